"""Check that ranks that train together have the same recipe; if one rank fails, end all with one message."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

# number of beats that a rank may miss before it counts as gone, once a collective operation has failed; before that,
# the timeout decides
_MISSED_BEATS = 5
_RUNS = 0


class RankFailure(OSError):
    """Another rank failed; the message names that rank and repeats its error message."""


@contextmanager
def together(timeout: float) -> Iterator[None]:
    """Connect the ranks of a run and watch them in this `with` block; do nothing for one process or a nested block.

    Every rank increments a counter, its beat, in the store of the process group. If a rank raises an error, ends
    without one, or writes no beat for `timeout` seconds, every other rank ends with a message that names this rank. A
    rank ends by a `RankFailure` or, while it waits in a collective operation, by printing the message and exiting with
    status 2.

    Args:
        timeout: seconds without a beat after which a rank counts as stopped.

    Raises:
        RankFailure: another rank failed first.
    """
    global _RUNS
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or _Watch.current is not None:
        yield
        return
    from accelerate import PartialState

    # transformers' training arguments reuse this process group
    PartialState(cpu=not torch.cuda.is_available())
    _RUNS += 1
    watch = _Watch.current = _Watch(timeout)
    try:
        yield
    except BaseException as error:
        cause = watch.report(error)
        if cause is not None:
            raise cause from error
        raise
    finally:
        watch.close()
        _Watch.current = None


class _Watch:
    """Threads that write this rank's beats to the store of the process group and read the other ranks' beats."""

    current: _Watch | None = None

    def __init__(self, timeout: float) -> None:
        self.rank, self.size, self.timeout = dist.get_rank(), dist.get_world_size(), timeout
        self.period = min(2.0, timeout / 20)
        run = "-".join(os.environ.get(f"TORCHELASTIC_{x}", "") for x in ("RUN_ID", "RESTART_COUNT"))
        self.address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        # use a separate connection: the process group's own one is blocked while a collective is set up
        store = TCPStore(*self.address, is_master=False, timeout=timedelta(seconds=timeout))
        self.store = PrefixStore(f"tokenmix/{run}/{_RUNS}", store)
        self.failure: str | None = None
        self.store_lost = False
        self.suspects = False
        now = time.monotonic()
        # for each rank: the last beat that was read, and the time at which it changed
        self.beats = {rank: (b"", now) for rank in range(self.size)}
        self.read_at = now
        self.over = threading.Event()
        self.threads = [threading.Thread(target=work, daemon=True) for work in (self._exchange, self._judge)]
        # barrier: all ranks write a first beat before any rank reads one
        self.store.set(f"beat/{self.rank}", "0")
        dist.barrier()
        for thread in self.threads:
            thread.start()

    def report(self, error: BaseException) -> RankFailure | None:
        """Report an error to the other ranks; return a RankFailure if another rank has caused it, else None."""
        if not _is_of_collective(error):
            told = " ".join(str(error).split()) or type(error).__name__
            host = socket.gethostname()
            self._publish(f"rank {self.rank} on {host}: {told}")
            if self.rank == 0:
                # the store may end with this process: wait until the other ranks have read the message
                self._wait_until_told()
            return None
        # another rank must have failed, but it has not reported that yet, or cannot
        self.suspects = True
        end = time.monotonic() + 3 * _MISSED_BEATS * self.period
        while self.failure is None and time.monotonic() < end:
            time.sleep(self.period / 4)
        if self.failure is None:
            self._publish(f"a collective operation failed on rank {self.rank}: {' '.join(str(error).split())[:200]}")
        return RankFailure(self.failure)

    def _wait_until_told(self) -> None:
        end = time.monotonic() + _MISSED_BEATS * self.period
        others = [f"told/{rank}" for rank in range(1, self.size)]
        with suppress(RuntimeError):
            while time.monotonic() < end and not self.store.check(others):
                time.sleep(self.period / 8)

    def close(self) -> None:
        """Stop the threads, so that this rank may end earlier than the others without counting as failed."""
        self.over.set()
        self.threads[0].join(self.period * 2)

    def _publish(self, told: str, *, store: bool = True) -> None:
        try:
            self.failure = self.store.compare_set("failure", "", told).decode() if store else told
        except RuntimeError:
            self.failure = told
        _write_torchelastic_error(self.failure)

    def _exchange(self) -> None:
        """Body of a thread: once per period, write this rank's beat and read the beats of other ranks."""
        beat = 0
        try:
            while not self.over.wait(self.period):
                beat += 1
                self.store.set(f"beat/{self.rank}", str(beat))
                # rank 0 watches all ranks; the other ranks watch only rank 0, unless they suspect a failure
                ranks = range(self.size) if self.rank == 0 or self.suspects else [0]
                now = time.monotonic()
                for rank, value in zip(ranks, self.store.multi_get([f"beat/{r}" for r in ranks]), strict=True):
                    if value != self.beats[rank][0]:
                        self.beats[rank] = value, now
                if self.store.check(["failure"]):
                    self.failure = self.store.get("failure").decode()
                    self.store.set(f"told/{self.rank}", "")
                self.read_at = time.monotonic()
            self.store.set(f"beat/{self.rank}", "left")
            # tell rank 0 not to wait for this rank, which has ended, perhaps by an error of its own
            self.store.set(f"told/{self.rank}", "")
        except RuntimeError:
            self.store_lost = True

    def _judge(self) -> None:
        """Body of a thread: find ranks that have stopped.

        End this process if it does not end by itself after a failure.
        """
        while not self.over.wait(self.period):
            if self.failure is None and (told := self._store_verdict()):
                # do not write the failure to the store, which does not answer
                self._publish(told, store=False)
            elif self.failure is None and (told := self._verdict()):
                self._publish(told)
            if self.failure is not None:
                break
        if not self.over.wait(2 * _MISSED_BEATS * self.period):
            assert self.failure is not None
            _write_torchelastic_error(self.failure)
            print(f"\nerror: {self.failure}", file=sys.stderr, flush=True)
            os._exit(2)

    def _store_verdict(self) -> str | None:
        if not self.store_lost and time.monotonic() - self.read_at <= self.timeout:
            return None
        what = "ended without a message" if self.store_lost else f"has not answered for {self.timeout:g} s"
        who = "rank 0"
        if "TORCHELASTIC_RUN_ID" in os.environ:
            # the store is in a torchrun process on another node, which ends after a rank of its node has failed
            who, what = "torchrun", f"{what}; the output of that torchrun names the rank that failed on its node"
        return f"{who} at {':'.join(map(str, self.address))}, which connects the ranks, {what}"

    def _verdict(self) -> str | None:
        now = time.monotonic()
        patience = _MISSED_BEATS * self.period if self.suspects else self.timeout
        silent = [r for r, (beat, since) in self.beats.items() if beat != b"left" and now - since > patience]
        watched = silent if self.rank == 0 or self.suspects else [r for r in silent if r == 0]
        watched = [r for r in watched if r != self.rank]
        if not watched:
            return None
        names = f"rank{'s' * (len(watched) > 1)} {', '.join(map(str, watched))}"
        if self.suspects:
            return f"{names} ended without a message, as a process does that is killed, often for lack of memory"
        return f"{names} sent no sign of life for {patience:g} s (--rank_timeout): stopped, or the machine is gone"


def _is_of_collective(error: BaseException) -> bool:
    """True if the error is that of a failed collective operation, whose cause is then another rank."""
    if isinstance(error, dist.DistError) or (error.__cause__ is not None and _is_of_collective(error.__cause__)):
        return True
    parts = ("gloo", "NCCL", "ProcessGroup", "Connection closed by peer", "Connection reset by peer")
    return type(error) is RuntimeError and any(part in str(error) for part in parts)


def _write_torchelastic_error(told: str) -> None:
    """Write the message to the file from which torchrun reads errors for its final summary."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        content = {"message": told, "extraInfo": {"py_callstack": told, "timestamp": str(int(time.time()))}}
        # ignore a failure to write: the disk may be full, which may be the cause itself
        with suppress(OSError):
            Path(path).write_text(json.dumps({"message": content}), encoding="utf-8")


def _gathered(value: Any) -> list[Any]:
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def require_agreement(values: Mapping[str, Any]) -> None:
    """Check that all ranks have equal values.

    Args:
        values: plain data by field name, as this rank has it.

    Raises:
        ValueError: raised on all ranks if a value differs; the message names each such field and two of its values.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    text = json.dumps(values, sort_keys=True, default=str)
    if len(set(_gathered(hashlib.sha256(text.encode()).hexdigest()))) == 1:
        return
    first, *others = (json.loads(x) for x in _gathered(text))
    differing = []
    for name in sorted({name for other in (first, *others) for name in other}):
        rank = next((r for r, other in enumerate(others, 1) if other.get(name) != first.get(name)), None)
        if rank is not None:
            differing.append(
                f"{name} is {first.get(name)!r} on rank 0 and {others[rank - 1].get(name)!r} on rank {rank}"
            )
    raise ValueError(f"the ranks do not run the same training: {'; '.join(differing)}; start all with the same command")


def require_shared_folder(folder: Path, patience: float = 5.0) -> None:
    """Check that all ranks see the files that rank 0 writes into `folder`.

    Args:
        folder: the folder, which is created if it is missing.
        patience: seconds to wait, because a network file system may show a new file only after some seconds.

    Raises:
        ValueError: raised on all ranks if one does not see them, as on two nodes without a shared file system.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    name: list[str] = [f".shared-{secrets.token_hex(8)}"]
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name[0]).touch()
    dist.broadcast_object_list(name)
    end = time.monotonic() + patience
    while not (seen := (folder / name[0]).exists()) and time.monotonic() < end:
        time.sleep(0.2)
    answers = _gathered((seen, socket.gethostname()))
    if dist.get_rank() == 0:
        (folder / name[0]).unlink()
    if blind := [(rank, host) for rank, (seen, host) in enumerate(answers) if not seen]:
        rank, host = blind[0]
        raise ValueError(
            f"rank {rank} on {host} does not see what rank 0 on {answers[0][1]} writes into {folder}; give all nodes a "
            "folder of a file system that they share"
        )
