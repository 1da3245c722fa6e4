import json
import os
import shutil
import signal
from dataclasses import replace

import pytest
import torch
from runs import (
    HYBRID,
    Hostile,
    Processes,
    adaptation,
    curve,
    manifest,
    penalised_model,
    recipe,
    run,
    slow_steps,
    steps_logged,
    train_traced,
    weights,
)
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainerCallback

from tokenmix_core.training.checkpoint import write_manifest
from tokenmix_core.training.engine import peak_flops
from tokenmix_core.training.trainer import build_trainer, train


def assert_identical(output_dir, reference):
    """Compare bit by bit on a CPU; with a tolerance on a GPU, which adds in varying order."""
    if torch.cuda.is_available():
        return assert_same_curve(curve(output_dir), curve(reference), tolerance=1e-3)
    assert curve(output_dir) == curve(reference)
    resumed, expected = weights(output_dir), weights(reference)
    assert all(torch.equal(resumed[name], expected[name]) for name in expected)


def assert_same_curve(a, b, *, tolerance=2e-5):
    assert a.keys() == b.keys()
    for step in a:
        assert a[step] == pytest.approx(b[step], rel=tolerance), f"step {step}"


@pytest.fixture(scope="module")
def reference(corpus, tmp_path_factory):
    """Return the folder of a run of the penalised model that was not interrupted."""
    folder = tmp_path_factory.mktemp("reference") / "run"
    train(recipe(corpus, model=penalised_model(), callbacks=(adaptation,)), folder, progress=False)
    return folder


def test_a_run_leaves_a_model_its_tokenizer_a_log_and_a_manifest(reference, corpus):
    model = AutoModelForCausalLM.from_pretrained(reference)
    tokenizer = AutoTokenizer.from_pretrained(reference)
    ids = tokenizer("word1 word", return_tensors="pt").input_ids
    text = tokenizer.decode(model.generate(ids, max_new_tokens=4, do_sample=False)[0])
    assert text.startswith("word1 word")
    content = json.loads((reference / "run.json").read_text())
    meta = json.loads((corpus / "meta.json").read_text())
    sums, held_out = meta["sha256"], meta["held_out_documents"]
    fingerprint = f"{sums['tokens.bin']} documents {sums['documents.npy']} held out {held_out}"
    assert content["identity"]["data"] == {"tokens-0": fingerprint}
    assert content["values"]["learning_rate"] == 1e-2
    losses = curve(reference)
    assert list(losses) == list(range(1, 9))
    assert losses[8][0] < losses[1][0]
    assert not list(reference.glob(".*")), "something half-written stayed behind"


def test_the_loss_curve_does_not_depend_on_accumulation(reference, corpus, tmp_path):
    # with a summed loss term, and with weights that adapt to what all micro-batches did
    made = recipe(corpus, model=penalised_model(), callbacks=(adaptation,), micro_batch_tokens=32)
    train(made, tmp_path / "run", progress=False)
    assert_same_curve(curve(reference), curve(tmp_path / "run"))
    name = "model.layers.1.mixer.head_weights.weight"
    got, expected = weights(tmp_path / "run")[name], weights(reference)[name]
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=0)
    assert (expected != 0.05).any(), "no weight was ever adapted"


@pytest.mark.skipif(torch.cuda.is_available(), reason="several processes share no GPU; test_two_gpus.py has its own")
def test_two_processes_follow_the_curve_of_one_and_survive_kill_9(reference, corpus, tmp_path):
    made = recipe(corpus, model=penalised_model(), callbacks=(adaptation,), micro_batch_tokens=32)
    slow = replace(made, callbacks=(*made.callbacks, slow_steps))
    pair = Processes(2, train, slow, tmp_path / "run", progress=False)
    pair.wait_for(lambda: steps_logged(tmp_path / "run") >= 5)
    pair.signal(signal.SIGKILL)
    assert pair.join() == [-signal.SIGKILL] * 2
    assert manifest(tmp_path / "run" / "checkpoint-3")["step"] == 3
    resumed = run(2, made, tmp_path / "run", resume=True)
    assert_same_curve(curve(reference), resumed)
    for name, expected in weights(reference).items():
        torch.testing.assert_close(weights(tmp_path / "run")[name], expected, rtol=1e-3, atol=1e-5)


def test_a_killed_run_goes_on_along_the_identical_curve(reference, corpus, tmp_path):
    made = recipe(corpus, model=penalised_model(), callbacks=(adaptation,))
    slow = replace(made, callbacks=(*made.callbacks, slow_steps))
    alone = Processes(1, train, slow, tmp_path / "run", progress=False)
    killed_at = 4 + os.getpid() % 4
    alone.wait_for(lambda: steps_logged(tmp_path / "run") >= killed_at)
    alone.signal(signal.SIGKILL)
    assert alone.join() == [-signal.SIGKILL]
    train(made, tmp_path / "run", resume=True, progress=False)
    assert_identical(tmp_path / "run", reference)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_leaves_a_checkpoint_from_which_the_run_goes_on(number, reference, corpus, tmp_path):
    # the signal reaches the processes that read data, too, and may come twice, as from `timeout`
    made = recipe(corpus, model=penalised_model(), callbacks=(adaptation,), save_steps=100, dataloader_num_workers=1)
    slow = replace(made, callbacks=(*made.callbacks, slow_steps))
    alone = Processes(1, train, slow, tmp_path / "run", progress=False)
    alone.wait_for(lambda: steps_logged(tmp_path / "run") >= 2)
    alone.signal(number, group=True)
    alone.signal(number)
    assert alone.join() == [0]
    (saved,) = (tmp_path / "run").glob("checkpoint-*")
    assert 2 <= manifest(saved)["step"] < 8
    AutoModelForCausalLM.from_pretrained(saved)
    train(made, tmp_path / "run", resume=True, progress=False)
    assert_identical(tmp_path / "run", reference)


def test_recomputing_does_not_change_the_curve(corpus, tmp_path):
    made = recipe(corpus, total_tokens=3 * 128, seq_len=16, documents="joined")
    train(made, tmp_path / "plain", progress=False)
    train(replace(made, run=replace(made.run, gradient_checkpointing=True)), tmp_path / "other", progress=False)
    assert_same_curve(curve(tmp_path / "plain"), curve(tmp_path / "other"), tolerance=1e-4)


def test_compiling_does_not_change_the_curve(corpus, tmp_path):
    made = recipe(corpus, total_tokens=3 * 128, seq_len=16, documents="joined")
    train(made, tmp_path / "plain", progress=False)
    assert Processes(1, train_traced, made, tmp_path / "other").join() == [0]
    assert_same_curve(curve(tmp_path / "plain"), curve(tmp_path / "other"), tolerance=1e-4)


def test_a_model_in_training_never_keeps_a_cache(corpus, tmp_path):
    trainer = build_trainer(recipe(corpus), tmp_path, progress=False)
    seen = []
    trainer.model.register_forward_pre_hook(lambda m, a, options: seen.append(options["use_cache"]), with_kwargs=True)
    trainer.train()
    assert seen == [False] * 8


def test_a_recipe_may_make_the_model_that_it_trains(corpus, tmp_path):
    own = AutoModelForCausalLM.from_config(recipe(corpus).model_config())
    asked = []

    def make(given):
        asked.append(given)
        return own

    makes = replace(recipe(corpus), make_model=make)
    assert build_trainer(makes, tmp_path / "run", progress=False).model is own
    assert asked == [makes]


def test_vectors_do_not_decay(corpus, tmp_path):
    trainer = build_trainer(recipe(corpus), tmp_path, progress=False)
    decaying, steady = trainer.create_optimizer().param_groups
    assert {p.dim() for p in decaying["params"]} == {2}
    assert {p.dim() for p in steady["params"]} == {1}
    assert (decaying["weight_decay"], steady["weight_decay"]) == (0.1, 0.0)


def test_the_log_holds_speed_and_loss_terms(reference):
    lines = [json.loads(line) for line in (reference / "metrics.jsonl").read_text().splitlines()]
    logged = [line for line in lines if "loss" in line]
    assert all(line["tokens_per_second"] > 0 for line in logged[1:])
    assert all(0 < line["size_loss"] < line["loss"] for line in logged)
    assert "size" not in logged[0], "only losses are sums over tokens"
    assert "model_flops_utilisation" not in logged[1], "no peak is known for a CPU"


def test_utilisation_is_told_for_known_gpus_in_bf16_only():
    assert peak_flops("NVIDIA H200", bf16=True) == 989e12
    assert peak_flops("NVIDIA H100 PCIe", bf16=True) == 756e12
    assert peak_flops("NVIDIA H200", bf16=False) is None
    assert peak_flops("Some Other GPU", bf16=True) is None


class _Poison(TrainerCallback):
    def on_step_begin(self, args, state, control, *, model, **_):
        if state.global_step == 4:
            with torch.no_grad():
                model.lm_head.weight.fill_(torch.nan)


@pytest.mark.parametrize(("logging_steps", "told"), [(1, "loss is nan at step 5"), (8, "not finite at step 6")])
def test_divergence_ends_the_run_before_a_checkpoint_of_it_is_written(logging_steps, told, corpus, tmp_path):
    made = recipe(corpus, callbacks=(lambda _: _Poison(),), logging_steps=logging_steps)
    with pytest.raises(FloatingPointError, match=told):
        train(made, tmp_path / "run", progress=False)
    assert [path.name for path in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-3"]
    assert all(value.isfinite().all() for value in weights(tmp_path / "run" / "checkpoint-3").values())


def _truncate(folder):
    os.truncate(folder / "model.safetensors", 100)


def _flip(folder):
    with open(folder / "optimizer.pt", "r+b") as file:
        file.seek(-50, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (_truncate, "model.safetensors has 100 bytes, expected"),
        (_flip, "the content of optimizer.pt has changed since"),
        (lambda folder: (folder / "rng_state.pth").unlink(), "rng_state.pth is missing"),
        (lambda folder: (folder / "manifest.json").unlink(), "no readable manifest.json"),
        (lambda folder: (folder / "manifest.json").write_text("[1]"), "no readable manifest.json"),
    ],
)
def test_a_damaged_checkpoint_is_refused_with_its_reason(damage, told, reference, corpus, tmp_path):
    shutil.copytree(reference, tmp_path / "run")
    damage(tmp_path / "run" / "checkpoint-8")
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "run").rglob("*")}
    made = recipe(corpus, model=penalised_model(), callbacks=(adaptation,))
    with pytest.raises(ValueError, match=told):
        train(made, tmp_path / "run", resume=True, progress=False)
    assert before == {p: p.stat().st_mtime_ns for p in (tmp_path / "run").rglob("*")}


def _sealed(folder, name, change):
    """Change a file of a checkpoint, and its manifest, so that the hashes match."""
    change(folder / name)
    content = manifest(folder)
    write_manifest(folder, {key: content[key] for key in ("step", "identity")})


def _hostile(path):
    torch.save(Hostile(path.with_name("ran")), path)


@pytest.mark.parametrize(
    ("name", "change", "told"),
    [
        ("rng_state.pth", lambda p: p.write_bytes(b"no pickle"), "its random state cannot be read"),
        ("rng_state.pth", lambda p: torch.save({"python": 1}, p), "its random state cannot be read"),
        ("rng_state.pth", lambda p: torch.save([1, 2], p), "its random state cannot be read"),
        ("optimizer.pt", lambda p: p.write_bytes(b""), "its optimizer and schedule cannot be read"),
        ("optimizer.pt", lambda p: torch.save({"state": 1}, p), "its optimizer and schedule cannot be read"),
        ("scheduler.pt", lambda p: torch.save(None, p), "its optimizer and schedule cannot be read"),
        ("rng_state.pth", _hostile, "its random state cannot be read"),
        ("optimizer.pt", _hostile, "its optimizer and schedule cannot be read"),
        ("scheduler.pt", _hostile, "its optimizer and schedule cannot be read"),
        ("model.safetensors", lambda p: os.truncate(p, 300), "its weights cannot be read"),
        ("trainer_state.json", lambda p: p.write_text("null"), "trainer_state.json cannot be read"),
        ("trainer_state.json", lambda p: p.write_text('{"global_step": 3}'), "is of step 3, expected 6"),
        ("scheduler.pt", lambda p: p.unlink(), "its manifest.json lists no scheduler"),
    ],
)
def test_what_a_checkpoint_holds_is_refused_where_it_cannot_be_read(name, change, told, reference, corpus, tmp_path):
    shutil.copytree(reference, tmp_path / "run")
    # a finished run would have no use for its random state
    shutil.rmtree(tmp_path / "run" / "checkpoint-8")
    _sealed(tmp_path / "run" / "checkpoint-6", name, change)
    made = recipe(corpus, model=penalised_model(), callbacks=(adaptation,))
    with pytest.raises(ValueError, match=told):
        train(made, tmp_path / "run", resume=True, progress=False)
    assert not (tmp_path / "run" / "checkpoint-6" / "ran").exists()


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"learning_rate": 2e-2}, "learning_rate was 0.01 and is 0.02"),
        ({"seed": 5}, "seed was 0 and is 5"),
        ({"model": HYBRID}, "model was .* and is"),
        ({"sources": ["mqar"], "mqar_vocab_size": 64}, "data was .* and is"),
    ],
)
def test_the_checkpoint_of_another_run_is_refused_with_what_differs(changes, told, reference, corpus):
    made = recipe(corpus, **{"model": penalised_model(), "callbacks": (adaptation,), **changes})
    with pytest.raises(ValueError, match=told):
        train(made, reference, resume=True, progress=False)


def test_a_full_disk_is_told_and_leaves_what_was_whole(corpus, tmp_path, monkeypatch):
    write = Trainer._save_checkpoint

    def full(self, *args, **options):
        # torch's text for a full disk
        if self.state.global_step > 3:
            raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 41024 vs 40912")
        return write(self, *args, **options)

    monkeypatch.setattr(Trainer, "_save_checkpoint", full)
    with pytest.raises(OSError, match=r"could not be written into .*run, where [\d,.]+ MB are free: .*unexpected pos"):
        train(recipe(corpus), tmp_path / "run", progress=False)
    monkeypatch.undo()
    assert [path.name for path in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-3"]
    assert train(recipe(corpus), tmp_path / "run", resume=True, progress=False).step == 8


@pytest.mark.parametrize("resume", [False, True])
def test_a_folder_with_other_files_is_refused(resume, corpus, tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ValueError, match="not empty; remove it, or choose"):
        train(recipe(corpus), tmp_path, resume=resume, progress=False)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"sources": ["nowhere"]}, "nowhere is no token file"),
        ({"model": {**HYBRID, "vocab_size": 100}}, "model.vocab_size must be at least 259"),
        ({"sources": ["mqar"], "mqar_pairs": 2}, "model.vocab_size must be at least 8192 for mqar"),
        ({"seq_len": 100}, "batch_tokens must be a multiple of seq_len"),
        ({"micro_batch_tokens": 96}, "micro_batch_tokens must be a multiple of seq_len=32 that divides"),
        ({"seq_len": 2**20, "batch_tokens": 2**20, "micro_batch_tokens": 2**20, "total_tokens": 2**21}, "fewer than"),
    ],
)
def test_recipes_that_do_not_fit_together_are_refused_and_leave_nothing(changes, told, corpus, tmp_path):
    with pytest.raises(ValueError, match=told):
        train(recipe(corpus, **changes), tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists() or not any((tmp_path / "run").iterdir())
