"""Test that after a power loss at any time a run can resume, and a corpus is complete or can be completed."""

import os
import shutil
import subprocess
from contextlib import contextmanager

import pytest
from runs import curve, recipe
from transformers import TrainerCallback

from tokenmix_core.data.prepare import prepare
from tokenmix_core.data.sources import Source
from tokenmix_core.data.token_file import TokenFile
from tokenmix_core.training.checkpoint import checkpoint_steps
from tokenmix_core.training.trainer import train

TEXTS = [f"document {i}" for i in range(50)]


def source():
    return Source({"corpus": "test"}, lambda n: iter(TEXTS[n:]))


@pytest.fixture
def calls(monkeypatch):
    """Return the calls that change the disk, in order: (name, paths at that time)."""
    made = []

    def spy(module, name, paths):
        real = getattr(module, name)

        def call(*args, **options):
            made.append((name, *paths(*args)))
            return real(*args, **options)

        monkeypatch.setattr(module, name, call)

    spy(os, "fsync", lambda handle: [os.readlink(f"/proc/self/fd/{handle}")])
    spy(os, "replace", lambda old, new: [str(old), str(new)])
    spy(os, "rename", lambda old, new: [str(old), str(new)])
    spy(shutil, "rmtree", lambda path, *rest, **options: [str(path)])
    return made


def assert_on_disk(calls, folder, renamed_from):
    """Assert that a folder and its files were synchronised before its rename, and its parent after it."""
    at = next(i for i, call in enumerate(calls) if call[0] in ("replace", "rename") and call[2] == str(folder))
    synced = [call[1] for call in calls[:at] if call[0] == "fsync"]
    for path in (folder, *folder.rglob("*")):
        inside = path.relative_to(folder).as_posix()
        assert os.path.normpath(f"{renamed_from}/{inside}") in synced, f"{inside} was not synchronised"
    assert ("fsync", str(folder.parent)) in calls[at:], "the rename was not synchronised"
    return at


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc to name the synchronised file")
@pytest.mark.parametrize("sharded", [False, True])
def test_a_checkpoint_is_on_the_disk_before_an_older_one_is_removed(sharded, calls, corpus, tmp_path):
    out = tmp_path / "run"
    kept = {}

    class Keep(TrainerCallback):
        def on_save(self, args, state, control, **_):
            path = out / f"checkpoint-{state.global_step}"
            kept[path] = sorted(p.relative_to(path) for p in path.rglob("*"))
            assert_on_disk(calls, path, out / ".partial" / path.name)

    changes = {"save_steps": 2, "save_total_limit": 1, "sharded_checkpoint": sharded}
    train(recipe(corpus, callbacks=(lambda _: Keep(),), **changes), out, progress=False)
    assert len(kept) == 4
    for older, newer in zip(list(kept), list(kept)[1:], strict=False):
        removed = calls.index(("rmtree", str(older)))
        renamed = calls.index(("replace", str(out / ".partial" / newer.name), str(newer)))
        assert ("fsync", str(out)) in calls[renamed:removed], f"{older.name} was removed too early"


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc to name the synchronised file")
def test_a_token_file_is_on_the_disk_before_its_parts_are_removed(calls, tmp_path):
    out = tmp_path / "out"
    prepare(source(), out, progress=False)
    renamed = assert_on_disk(calls, out, tmp_path / "out.partial" / "whole")
    removed = calls.index(("rmtree", str(tmp_path / "out.partial")))
    assert ("fsync", str(tmp_path)) in calls[renamed:removed], "the parts were removed too early"


@contextmanager
def mounted(image, folder):
    folder.mkdir(exist_ok=True)
    subprocess.run(["mount", "-o", "loop", str(image), str(folder)], check=True, capture_output=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True, capture_output=True)


@pytest.fixture
def disk(tmp_path):
    """Return an image with a mounted ext4 file system; a copy of the image is the disk after a power loss."""
    image = tmp_path / "image"
    try:
        with open(image, "wb") as file:
            file.truncate(48 * 2**20)
        subprocess.run(["mkfs.ext4", "-q", str(image)], check=True, capture_output=True)
        with mounted(image, tmp_path / "probe"):
            pass
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"this machine lets the test mount no image: {error}")
    with mounted(image, tmp_path / "disk") as folder:
        yield image, folder


def test_a_run_goes_on_from_the_disk_as_a_power_loss_left_it(disk, corpus, tmp_path):
    image, folder = disk
    lost = tmp_path / "lost"

    class PowerLoss(TrainerCallback):
        def on_save(self, args, state, control, **_):
            if state.global_step == 4:
                assert list(checkpoint_steps(folder / "run")) == [4]
                shutil.copy(image, lost)

    made = recipe(corpus, save_steps=2, save_total_limit=1)
    whole = recipe(corpus, save_steps=2, save_total_limit=1, callbacks=(lambda _: PowerLoss(),))
    train(whole, folder / "run", progress=False)
    with mounted(lost, tmp_path / "after") as after:
        assert 4 in checkpoint_steps(after / "run")
        train(made, after / "run", resume=True, progress=False)
        assert curve(after / "run")[8] == curve(folder / "run")[8]


def test_a_corpus_is_whole_on_the_disk_as_a_power_loss_left_it(disk, tmp_path):
    image, folder = disk
    prepare(source(), folder / "out", held_out=0.1, progress=False)
    shutil.copy(image, tmp_path / "lost")
    with mounted(tmp_path / "lost", tmp_path / "after") as after:
        assert TokenFile(after / "out", "all").num_documents == len(TEXTS)
        assert not (after / "out" / "train.tokens").exists()
