"""A pool of processes that serve as ranks in tests of sequences that are split over ranks."""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist


def ranks(*default: int) -> list[int]:
    """Return the rank counts to test: the environment variable TOKENMIX_RANKS, such as "4,8", or else `default`."""
    chosen = os.environ.get("TOKENMIX_RANKS")
    return [int(size) for size in chosen.split(",")] if chosen else list(default)


class RankPool:
    """A pool of `most` processes (with gloo more, if TOKENMIX_RANKS asks for them).

    `pool(3, check, *args)` runs `check` on the first three processes and returns the result of rank 0. The processes
    are forked from a server that has imported torch, and can be used for any number of calls. `check` must be
    importable; its first argument is the process group of the three ranks. If a rank raises an error or does not answer
    within `timeout` seconds, the call ends all processes and raises an AssertionError; the next call starts new ones.
    """

    def __init__(self, most: int = 4, timeout: float = 120.0, backend: str = "gloo"):
        self.most, self.timeout, self.backend = max([most, *ranks()]) if backend == "gloo" else most, timeout, backend
        self.workers: list[tuple[Any, Connection]] = []

    def __call__(self, size: int, run: Callable[..., Any], *args: Any) -> Any:
        if not self.workers:
            self._start()
        for _, pipe in self.workers[:size]:
            pipe.send((size, run, args))
        answers = [pipe.recv() if pipe.poll(self.timeout) else (False, "no answer") for _, pipe in self.workers[:size]]
        failed = [f"rank {rank}: {text}" for rank, (fine, text) in enumerate(answers) if not fine]
        if failed:
            self.close()
            raise AssertionError("\n".join(failed))
        return answers[0][1]

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        # the server imports core's split operations and the caller's models once, because ranks that import them at
        # different speeds would exceed the group's timeout; it cannot import tests/support, which is not on its path
        models = [name for name in sys.modules if name.startswith("tokenmix_") and name.endswith(".model")]
        context.set_forkserver_preload(["tokenmix_core.parallel", *models])
        store = tempfile.mktemp()
        for rank in range(self.most):
            ours, theirs = context.Pipe()
            worker = context.Process(
                target=_work, args=(rank, self.most, store, theirs, self.timeout, self.backend), daemon=True
            )
            worker.start()
            self.workers.append((worker, ours))

    def close(self) -> None:
        """End the pool's processes."""
        for worker, _ in self.workers:
            worker.kill()
            worker.join()
        self.workers = []


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """Yield one pool of four ranks for all tests of split sequences; for the conftest of a package."""
    pool = RankPool(4)
    yield pool
    pool.close()


def _work(rank: int, most: int, store: str, pipe: Connection, timeout: float, backend: str) -> None:
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    limit = timedelta(seconds=timeout / 2)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=most, timeout=limit)
    groups = {size: dist.new_group(list(range(size)), timeout=limit) for size in range(1, most + 1)}
    while True:
        size, run, args = pipe.recv()
        try:
            answer = True, run(groups[size], *args)
        except Exception:
            answer = False, traceback.format_exc()
        pipe.send(answer)
