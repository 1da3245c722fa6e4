"""Checks that a training step never waits for a CUDA stream, and can be captured from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def stalls_forbidden() -> Iterator[None]:
    """Inside, whatever waits for the device raises an error. Compile and load kernels before."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def assert_replays(step: Callable[[], Sequence[Tensor]]) -> None:
    """Assert that a step replayed from a CUDA graph equals the run step bit by bit, in all tensors that it writes."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            expected = step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for y in captured:
        y.detach().fill_(float("nan"))
    graph.replay()
    for got, wanted in zip(captured, expected, strict=True):
        assert torch.equal(got, wanted)
