"""Test FSDP2 on a CPU: the curve of one process, and checkpoints for any number of processes, sharded or not."""

import json
import pickle
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from runs import (
    HYBRID,
    Hostile,
    Processes,
    check_autocast,
    check_sharded,
    curve,
    recipe,
    refuse_on_ranks,
    run,
    stop_each_step,
)
from torch.distributed.checkpoint.metadata import BytesStorageMetadata
from transformers import AutoModelForCausalLM

from tokenmix_core.cli import main
from tokenmix_core.cli.commands import load_model
from tokenmix_core.training import sharding
from tokenmix_core.training.resharding import MemoryPlan, memory_plan
from tokenmix_core.training.trainer import train

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="several processes share no GPU")


def made(corpus, **changes):
    # six rows per step can be divided among one, two and three processes
    return recipe(corpus, batch_tokens=192, micro_batch_tokens=32, total_tokens=8 * 192, save_total_limit=9, **changes)


@pytest.fixture(scope="module")
def single(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("single") / "run"
    train(made(corpus), folder, progress=False)
    return curve(folder)


# (processes, fsdp, fsdp_reshard, sharded_checkpoint) of each step of one run
PHASES = [
    (2, True, "auto", False),
    (3, True, "always", True),
    (2, True, "always", False),
    (1, True, "auto", True),
    (2, False, "auto", True),
    (2, True, "never", True),
    (1, False, "auto", False),
    (2, True, "auto", False),
]


# eight runs in processes of their own take minutes on a busy machine
@pytest.mark.timeout(1200)
def test_each_step_of_a_run_by_other_processes_sharded_or_not(single, corpus, tmp_path):
    out = tmp_path / "run"
    for step, (processes, fsdp, reshard, shards) in enumerate(PHASES, 1):
        checks = (check_sharded,) if processes > 1 else ()
        changes = {"fsdp": fsdp, "fsdp_reshard": reshard, "sharded_checkpoint": shards}
        # both layers of the model in one unit, or one layer by default
        changes["fsdp_unit_layers"] = 2 * (step in (2, 6))
        run(processes, made(corpus, callbacks=(*checks, stop_each_step), **changes), out, resume=step > 1)
        assert curve(out)[step] == pytest.approx(single[step], rel=2e-5), f"step {step}"
        written = sorted(path.name for path in (out / f"checkpoint-{step}").rglob("*.distcp"))
        # one file for the model, and one for the optimizer
        assert written == [f"__{rank}_0.distcp" for rank in range(processes) for _ in "ab"] * shards
        assert (out / f"checkpoint-{step}" / "model.safetensors").exists() is not shards
        policy = json.loads((out / "run.json").read_text())["fsdp"]
        if fsdp and processes > 1:
            assert (policy["param_dtype"], policy["reduce_dtype"]) == (None, "float32")
            assert policy["reshard"] is (reshard == "always")
            assert policy["unit_layers"] == 1 + (step in (2, 6))
        else:
            assert policy is None
    assert max(curve(out)) == len(PHASES)
    AutoModelForCausalLM.from_pretrained(out)
    with pytest.raises(ValueError, match="checkpoint-6 is a sharded checkpoint"):
        load_model(out / "checkpoint-6")


@pytest.mark.parametrize("fsdp", [False, True], ids=["DDP", "FSDP2"])
def test_precision_is_that_of_one_process(fsdp, corpus, tmp_path):
    single, several = tmp_path / "single", tmp_path / "several"
    train(made(corpus, precision="bf16", callbacks=(check_autocast,)), single, progress=False)
    run(2, made(corpus, precision="bf16", fsdp=fsdp, callbacks=(check_autocast,)), several)
    for step, values in curve(single).items():
        assert curve(several)[step] == pytest.approx(values, rel=2e-3), f"step {step}"


@pytest.fixture
def shards(tmp_path):
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    sharding.save_shards(model, optimizer, tmp_path)
    return model, optimizer, tmp_path


HOSTILE = {
    "code": (
        lambda was, ran: pickle.dumps(Hostile(ran)),
        "names (pathlib|builtins)",
    ),
    "objects": (lambda was, ran: pickle.dumps({"weight": BytesStorageMetadata()}), "names .*BytesStorageMetadata"),
    "attributes": (lambda was, ran: was.replace(b"\x8c\x04Size", b"\x8c\x04load"), "names torch.load"),
    "cut": (lambda was, ran: was[:99], "is damaged"),
    "another object": (lambda was, ran: pickle.dumps([1]), "holds a list"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_metadata_that_could_run_code_are_refused(name, shards):
    model, optimizer, folder = shards
    change, told = HOSTILE[name]
    for part in ("model_shards", "optimizer_shards"):
        path = folder / part / ".metadata"
        path.write_bytes(change(path.read_bytes(), folder / "ran"))
        # torch falls back to the file of a rank
        path.with_name("__0.metadata").write_bytes(pickle.dumps(Hostile(folder / "ran")))
    with pytest.raises(ValueError, match=told):
        sharding.load_weight_shards(model, folder)
    with pytest.raises(ValueError, match=told):
        sharding.load_optimizer_shards(model, optimizer, folder)
    assert not (folder / "ran").exists()


def test_what_several_ranks_cannot_follow_is_refused(tmp_path):
    assert Processes(2, refuse_on_ranks, tmp_path).join() == [0, 0]
    for rank in (0, 1):
        told = (tmp_path / f"rank{rank}").read_text().splitlines()
        assert "has no gradient: before training on several ranks, freeze parameters" in told[0]
        assert "frozen or unfrozen after the first step" in told[1]


def test_tied_weights_are_sharded_once(corpus, tmp_path):
    model = {**HYBRID, "tie_word_embeddings": True}
    train(made(corpus, model=model), tmp_path / "single", progress=False)
    got = run(2, made(corpus, model=model, fsdp=True, callbacks=(check_sharded,)), tmp_path / "run")
    for step, values in curve(tmp_path / "single").items():
        assert got[step] == pytest.approx(values, rel=2e-5), f"step {step}"
    AutoModelForCausalLM.from_pretrained(tmp_path / "run")


def test_two_nodes_by_torchrun_with_a_rendezvous_follow_the_curve(corpus, tmp_path):
    sizes = {"seq_len": 32, "batch_tokens": 192, "micro_batch_tokens": 96, "total_tokens": 960, "warmup_tokens": 192}
    fields = {"sources": corpus, "precision": "fp32", "logging_steps": 1, "model.num_hidden_layers": 2, **sizes}
    command = ["train", "tiny", "--no-eval", *(word for name, x in fields.items() for word in (f"--{name}", str(x)))]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    options = {"nnodes": 2, "nproc-per-node": 1, "rdzv-backend": "c10d", "rdzv-id": 1, "rdzv-endpoint": endpoint}
    launcher = [sys.executable, "-m", "torch.distributed.run", *(f"--{k}={x}" for k, x in options.items())]
    launcher += ["-m", "tokenmix_core.cli"]
    nodes = [subprocess.Popen([*launcher, *command, "--out", tmp_path / "run"]) for _ in "ab"]
    assert main([*command, "--out", str(tmp_path / "one")]) == 0
    assert [node.wait(100) for node in nodes] == [0, 0]
    got = curve(tmp_path / "run")
    for step, values in curve(tmp_path / "one").items():
        assert got[step] == pytest.approx(values, rel=2e-5), f"step {step}"


@pytest.mark.parametrize(
    ("gigabytes", "asked", "reshards", "suggested"),
    [(24, "auto", False, True), (12, "auto", False, False), (9, "auto", True, False), (9, "never", False, False)],
)
def test_gathered_parameters_stay_if_the_memory_allows_it(gigabytes, asked, reshards, suggested):
    plan = MemoryPlan(gigabytes * 1e9, kept=8e9, replicated=12e9)
    assert plan.reshards(asked) is reshards
    told = plan.told(asked)
    assert ("each layer" in told) is reshards
    assert ("leave out --fsdp" in told) is suggested
    assert "\n" not in told


@pytest.mark.parametrize(
    ("layers", "megabytes", "asked", "expected"),
    [(24, 56, 0, 3), (24, 200, 0, 1), (24, 56, 1, 1), (24, 1, 0, 6), (2, 1, 0, 1), (2, 1, 2, 2)],
)
def test_units_have_enough_layers_for_large_collectives(layers, megabytes, asked, expected):
    plan = MemoryPlan(80e9, 8e9, 12e9, layers, megabytes * 1e6)
    assert plan.unit_layers(asked) == expected
    assert f"layers per unit: {expected} (" in plan.told("auto", asked)


def test_the_estimate_counts_parameters_tokens_and_shards():
    config = SimpleNamespace(num_hidden_layers=4, hidden_size=100, vocab_size=1000)
    model = torch.nn.Linear(1000, 1000, bias=False)
    model.config = config

    def kept(**changes):
        return memory_plan(model, **{"tokens": 10, "ranks": 2, "bf16": True, "checkpointing": False, **changes}).kept

    assert kept() == 16e6 + 10 * (42 * 400 + 10_000)
    assert kept(ranks=4) == kept() - 4e6
    assert kept(bf16=False) > kept() > kept(checkpointing=True)
