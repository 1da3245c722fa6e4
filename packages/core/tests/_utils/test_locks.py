"""Test that a folder has one writer at a time: others are told at once who it is, and a killed one loses the lock."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from tokenmix_core._utils.locks import HOLDER, FolderLock, check_unused, contents, one_at_a_time

HOLD = """
import sys, time
from pathlib import Path
from tokenmix_core._utils.locks import FolderLock
with FolderLock(Path(sys.argv[1]), "training"):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def other(tmp_path):
    """Start another process that holds the lock of `run`."""
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path / "run")], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"held\n"
        yield process
        process.kill()


def test_the_second_process_is_told_who_holds_the_lock_and_a_kill_releases_it(other, tmp_path):
    run = tmp_path / "run"
    told = rf"run is in use: process {other.pid} on {socket.gethostname()} has been training there since \d{{4}}-"
    for refused in (lambda: FolderLock(run, "training").acquire(), lambda: check_unused(run)):
        with pytest.raises(ValueError, match=told):
            refused()
    assert contents(run) == []
    other.send_signal(signal.SIGKILL)
    other.wait()
    check_unused(run)
    with FolderLock(run, "evaluating"):
        assert json.loads((run / HOLDER).read_text())["pid"] == os.getpid()


def test_a_folder_that_was_made_for_nothing_is_removed(tmp_path):
    with FolderLock(tmp_path / "a" / "b", "training"):
        assert contents(tmp_path / "a" / "b") == []
    assert not (tmp_path / "a").exists()
    (tmp_path / "there").mkdir()
    with FolderLock(tmp_path / "there", "training"):
        (tmp_path / "there" / "file").touch()
    assert [path.name for path in (tmp_path / "there").iterdir()] == ["file"]


def test_a_lock_is_held_until_the_end_of_the_with(tmp_path):
    with FolderLock(tmp_path, "training"), pytest.raises(ValueError, match="has been training there"):
        FolderLock(tmp_path, "training").acquire()
    with FolderLock(tmp_path, "training"):
        pass


def test_writers_of_results_take_turns(tmp_path):
    inside, seen = [], []

    def write(name):
        with one_at_a_time(tmp_path / "out"):
            inside.append(name)
            time.sleep(0.05)
            seen.append(len(inside))
            inside.remove(name)

    threads = [threading.Thread(target=write, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [1, 1, 1, 1]
