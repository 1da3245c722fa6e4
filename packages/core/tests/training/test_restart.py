"""Test that a run that ended at any time, for any reason, can be continued by the same command."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from dataclasses import replace

import pytest
from runs import Processes, curve, manifest, recipe, slow_steps, touch_steps, train_with_small_files
from transformers import TrainerCallback

from support.corpora import token_file
from tokenmix_core._utils.locks import FolderLock, contents
from tokenmix_core.cli.app import main
from tokenmix_core.data.token_file import TokenFile
from tokenmix_core.training.callbacks import StopOnSignal, read_metrics
from tokenmix_core.training.checkpoint import check_checkpoint
from tokenmix_core.training.trainer import train


@pytest.fixture(scope="module")
def whole(corpus, tmp_path_factory):
    """Return the folder of a run that was not interrupted."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    train(recipe(corpus), folder, progress=False)
    return folder


@pytest.mark.parametrize("resume", [False, True])
def test_a_run_without_a_checkpoint_begins_again(resume, whole, corpus, tmp_path, capsys):
    out = tmp_path / "run"
    out.mkdir()
    # a killed process leaves such files
    shutil.copy(whole / "run.json", out)
    (out / "metrics.jsonl").write_text('{"step": 1, "loss": 9.0}\n{"step": 2, "lo')
    (out / ".run-0123456789abcdef.json").write_text("{")
    (out / ".partial" / "checkpoint-3").mkdir(parents=True)
    (out / ".partial" / "checkpoint-3" / "model.safetensors").write_text("half")
    train(recipe(corpus), out, resume=resume, progress=False)
    assert curve(out) == curve(whole)
    assert sorted(p.name for p in out.iterdir()) == sorted(p.name for p in whole.iterdir())
    said = capsys.readouterr().err
    assert ("holds no checkpoint yet: training starts from the beginning" in said) == resume


def test_resume_begins_a_run_whose_folder_does_not_exist(whole, corpus, tmp_path):
    train(recipe(corpus), tmp_path / "new" / "run", resume=True, progress=False)
    assert curve(tmp_path / "new" / "run") == curve(whole)


@pytest.mark.parametrize("name", ["notes.txt", "config.json", "runs/mine", "run.json"])
def test_files_that_are_not_of_a_run_are_never_overwritten(name, corpus, tmp_path):
    path = tmp_path / "run" / name
    path.parent.mkdir(parents=True)
    path.write_text('{"recipe": 3}')
    with pytest.raises(ValueError, match="is not empty; remove it, or choose another folder"):
        train(recipe(corpus), tmp_path / "run", progress=False)
    assert path.read_text() == '{"recipe": 3}'


def test_a_corpus_with_other_documents_or_held_out_documents_is_another_corpus(corpus, tmp_path):
    there = TokenFile(corpus, "all")
    identity = {"data": {"tokens-0": there.fingerprint}}
    for name, change in {
        "held out": lambda meta: meta | {"held_out_documents": 0, "held_out_tokens": 0},
        "documents": lambda meta: meta | {"sha256": meta["sha256"] | {"documents.npy": "0" * 64}},
    }.items():
        shutil.copytree(corpus, tmp_path / name)
        meta = json.loads((corpus / "meta.json").read_text())
        assert meta["held_out_documents"] > 0
        (tmp_path / name / "meta.json").write_text(json.dumps(change(meta)))
        changed = TokenFile(tmp_path / name, verify=False)
        assert changed.meta.sha256["tokens.bin"] == there.meta.sha256["tokens.bin"]
        with pytest.raises(ValueError, match="belongs to another run: data was"):
            check_checkpoint(
                _checkpoint(tmp_path / f"{name} run", identity), {"data": {"tokens-0": changed.fingerprint}}
            )
    # the form of runs that began before is accepted for the same tokens, and only for those
    old = _checkpoint(tmp_path / "old", {"data": {"tokens-0": there.meta.sha256["tokens.bin"]}})
    check_checkpoint(old, identity)
    with pytest.raises(ValueError, match="belongs to another run: data was"):
        check_checkpoint(old, {"data": {"tokens-0": "0" * 64 + there.fingerprint[64:]}})


def _checkpoint(folder, identity):
    from tokenmix_core.training.checkpoint import write_manifest

    folder.mkdir()
    for name in ("model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth"):
        (folder / name).write_text(name)
    (folder / "trainer_state.json").write_text('{"global_step": 4}')
    write_manifest(folder, {"step": 4, "identity": identity})
    return folder


def test_a_run_of_an_older_version_is_resumed(whole, corpus, tmp_path):
    shutil.copytree(whole, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoint-8")
    path = tmp_path / "run" / "checkpoint-6" / "manifest.json"
    content = json.loads(path.read_text())
    content["identity"]["data"] = {"tokens-0": TokenFile(corpus).meta.sha256["tokens.bin"]}
    path.write_text(json.dumps(content))
    train(recipe(corpus), tmp_path / "run", resume=True, progress=False)
    assert curve(tmp_path / "run") == curve(whole)


def test_two_processes_stop_at_once_however_rarely_they_log(corpus, tmp_path):
    made = recipe(corpus, micro_batch_tokens=32, logging_steps=1000, save_steps=1000, total_tokens=1000 * 128)
    made = replace(made, callbacks=(slow_steps, touch_steps))
    pair = Processes(2, train, made, tmp_path / "run", progress=False)
    pair.wait_for((tmp_path / "run" / "step-2").exists)
    # signal only one of the processes
    os.kill(pair.children[1].pid, signal.SIGTERM)
    assert pair.join() == [0, 0]
    (saved,) = (tmp_path / "run").glob("checkpoint-*")
    assert 2 <= manifest(saved)["step"] < 50


def test_torchrun_into_a_folder_in_use_ends_at_once_and_says_who_holds_it(corpus, tmp_path):
    command = ["-m", "tokenmix_core.cli", "train", "tiny", "--out", tmp_path / "run", "--sources", corpus, "--no-eval"]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    with FolderLock(tmp_path / "run", "training"):
        # most of the time is spent on imports
        ended = subprocess.run([*launcher, *command], capture_output=True, text=True, timeout=120)
        assert contents(tmp_path / "run") == []
    # the launcher's own report follows, and ends with the same sentence above a rule
    ours = ended.stderr.partition("torch/distributed")[0]
    told = f"run is in use: process {os.getpid()} on {socket.gethostname()} has been training there since"
    assert ended.returncode == 1
    assert told in ours
    assert "run is in use" in ended.stderr.strip().splitlines()[-2]
    assert "Traceback" not in ours


def test_only_what_is_done_is_told_of_a_signal(corpus, tmp_path, monkeypatch, capsys):
    begun = StopOnSignal.on_step_end

    def stop(self, args, state, control, **rest):
        if state.global_step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return begun(self, args, state, control, **rest)

    monkeypatch.setattr(StopOnSignal, "on_step_end", stop)
    assert train(recipe(corpus), tmp_path / "run", progress=False).interrupted
    said = capsys.readouterr().err
    assert said.index("SIGTERM received: finishing this step") < said.index("checkpoint of step 2 written; stopping")


def test_the_log_is_restored_from_the_checkpoint(whole, corpus, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(whole, out)
    shutil.rmtree(out / "checkpoint-8")
    lines = (out / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    # a power loss may leave such a file: with a hole, and without its end
    (out / "metrics.jsonl").write_bytes(lines[0] + b"\0" * 50 + b"\n" + lines[3][:20])
    train(recipe(corpus), out, resume=True, progress=False)
    assert curve(out) == curve(whole)
    assert [line["step"] for line in read_metrics(out / "metrics.jsonl")] == [*range(1, 9), 8]


def test_resuming_a_finished_run_adds_nothing_to_its_log(whole, corpus, tmp_path):
    shutil.copytree(whole, tmp_path / "run")
    assert train(recipe(corpus), tmp_path / "run", resume=True, progress=False).step == 8
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == (whole / "metrics.jsonl").read_text()


def test_values_that_a_callback_adds_to_the_log_are_in_the_checkpoint_too(corpus, tmp_path):
    class Add(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **_):
            logs["added"] = 7

    train(recipe(corpus, callbacks=(lambda _: Add(),), total_tokens=3 * 128), tmp_path / "run", progress=False)
    state = json.loads((tmp_path / "run" / "checkpoint-3" / "trainer_state.json").read_text())
    assert [line["added"] for line in state["log_history"]] == [7, 7, 7]


class Spoil(TrainerCallback):
    def __init__(self, do):
        self.do = do

    def on_step_end(self, args, state, control, **_):
        if state.global_step == 4:
            self.do()


def _kill_readers():
    import multiprocessing

    for child in multiprocessing.active_children():
        os.kill(child.pid, signal.SIGKILL)
        child.join()


def test_a_killed_reader_of_data_is_told_in_a_sentence(corpus, tmp_path):
    made = recipe(corpus, dataloader_num_workers=1, callbacks=(lambda _: Spoil(_kill_readers),))
    with pytest.raises(OSError, match="process that reads training data was killed, often for lack of memory"):
        train(made, tmp_path / "run", progress=False)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_corpus_that_shrinks_during_training_is_told_in_a_sentence(workers, tmp_path):
    corpus = token_file(tmp_path, [f"document {i}" * 9 for i in range(99)])
    made = recipe(corpus, dataloader_num_workers=workers, total_tokens=400 * 128, save_steps=1000)
    made = replace(made, callbacks=(lambda _: Spoil(lambda: os.truncate(corpus / "tokens.bin", 0)),))
    with pytest.raises(ValueError, match=r"tokens.bin is truncated: expected \d+ bytes, got 0") as error:
        train(made, tmp_path / "run", progress=False)
    assert "Traceback" not in str(error.value)


def test_the_message_of_an_error_has_a_line_of_its_own(corpus, tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("TQDM_DELAY", raising=False)
    made = recipe(corpus, callbacks=(lambda _: Spoil(_fail),), save_steps=100)
    assert main(["train", "small", "--out", str(tmp_path / "run"), "--no-eval"], recipes={"small": lambda: made}) == 2
    *_, before, last = capsys.readouterr().err.rstrip("\n").split("\n")
    assert last == "tokenmix train: error: no luck"
    assert "training" in before


def _fail():
    raise ValueError("no luck")


@pytest.mark.skipif(sys.platform != "linux", reason="sets a limit of Linux")
def test_a_limit_of_the_size_of_files_is_told(corpus, tmp_path):
    assert Processes(1, train_with_small_files, recipe(corpus), tmp_path / "run").join() == [0]
    said = (tmp_path / "run" / "said").read_text()
    assert "and the limit of a file's size is 0.0 MB (ulimit -f)" in said


def test_an_old_checkpoint_may_be_a_symbolic_link(corpus, tmp_path):
    out, elsewhere = tmp_path / "run", tmp_path / "elsewhere"

    def move():
        (out / "checkpoint-3").rename(elsewhere)
        (out / "checkpoint-3").symlink_to(elsewhere)

    made = recipe(corpus, save_total_limit=1, callbacks=(lambda _: Spoil(move),))
    train(made, out, progress=False)
    assert (elsewhere / "model.safetensors").exists()
    assert [p.name for p in out.glob("checkpoint-*")] == ["checkpoint-8"]


@pytest.mark.parametrize("resume", [False, True])
def test_a_symbolic_link_to_nothing_is_told(resume, corpus, tmp_path):
    (tmp_path / "run").symlink_to(tmp_path / "nothing")
    with pytest.raises(ValueError, match=r"run is a symbolic link to .*nothing, which does not exist; choose another"):
        train(recipe(corpus), tmp_path / "run", resume=resume, progress=False)
