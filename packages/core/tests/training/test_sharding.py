"""FSDP2 on a CPU: the curve of one process, and checkpoints for any number of processes, sharded or not."""

import json

import pytest
import torch
from runs import HYBRID, check_sharded, curve, recipe, run, stop_at_5
from transformers import AutoModelForCausalLM

from tokenmix_core.training.trainer import train

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="several processes share no GPU")


def made(corpus, **changes):
    # six rows a step, which one, two and three processes can divide
    return recipe(corpus, batch_tokens=192, micro_batch_tokens=32, total_tokens=8 * 192, **changes)


@pytest.fixture(scope="module")
def single(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("single") / "run"
    train(made(corpus), folder, progress=False)
    return curve(folder)


@pytest.mark.parametrize(("first", "second"), [((2, True), (3, True)), ((2, True), (1, True)), ((2, False), (2, True))])
def test_a_run_goes_on_sharded_or_not_on_another_number_of_processes(first, second, single, corpus, tmp_path):
    out = tmp_path / "run"
    for (processes, fsdp), stop in ((first, True), (second, False)):
        checks = (check_sharded,) if processes > 1 else ()
        callbacks = (*checks, stop_at_5) if stop else checks
        run(processes, made(corpus, fsdp=fsdp, callbacks=callbacks), out, resume=not stop)
        assert max(curve(out)) == (5 if stop else 8)
    policy = json.loads((out / "run.json").read_text())["fsdp"]
    assert policy == (None if second[0] == 1 else {**policy, "param_dtype": None, "reduce_dtype": "float32"})
    AutoModelForCausalLM.from_pretrained(out)
    got = curve(out)
    for step, values in single.items():
        assert got[step] == pytest.approx(values, rel=2e-5), f"step {step}"


def test_tied_weights_are_sharded_once(corpus, tmp_path):
    model = {**HYBRID, "tie_word_embeddings": True}
    train(made(corpus, model=model), tmp_path / "single", progress=False)
    got = run(2, made(corpus, model=model, fsdp=True, callbacks=(check_sharded,)), tmp_path / "run")
    for step, values in curve(tmp_path / "single").items():
        assert got[step] == pytest.approx(values, rel=2e-5), f"step {step}"
    AutoModelForCausalLM.from_pretrained(tmp_path / "run")
