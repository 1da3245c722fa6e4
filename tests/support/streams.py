"""Check that a training step never waits for a CUDA stream, and that a CUDA graph can capture it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def stalls_forbidden() -> Iterator[None]:
    """Context manager: operations that wait for the device raise an error. Compile and load kernels before."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def assert_replays(step: Callable[[], Sequence[Tensor]]) -> None:
    """Assert that a step replayed by a CUDA graph writes bit by bit the same tensors as the step itself."""
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
