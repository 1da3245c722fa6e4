"""Capture and replay CUDA graphs, and the environment variable that disables them in decoding."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tokenmix_core.kernels.launch.flags import flag

# type of functions that capture another function's device work without executing it, and return a function that replays
# this work
Capture = Callable[[Callable[[], object]], Callable[[], object]]

_VARIABLE = "TOKENMIX_DECODING_GRAPH"


def wanted() -> bool:
    """Return False if the environment variable `TOKENMIX_DECODING_GRAPH` is 0: no CUDA graphs in decoding; else True.

    Raises:
        ValueError: the variable is neither 0 nor 1.
    """
    return flag(_VARIABLE, True, "launch every kernel", "replay captured steps")


def capture_on(device: torch.device) -> Capture | None:
    """Return a function that captures a function's work on a device as a graph; None if the device has no graphs."""
    return captures_cuda(device) if device.type == "cuda" else None


def at_most_half_used(device: torch.device) -> bool:
    """Tell whether the process's peak of allocated memory is at most half of the device's memory; true for a CPU."""
    if device.type != "cuda":
        return True
    return 2 * torch.cuda.max_memory_allocated(device) <= torch.cuda.get_device_properties(device).total_memory


@contextmanager
def noting_waits(device: torch.device) -> Iterator[list[str]]:
    """Yield a list that, after the block, names each line that waited for a GPU: a graph cannot contain waits.

    For other devices the list stays empty.
    """
    waits: list[str] = []
    if device.type != "cuda":
        yield waits
        return
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield waits
        finally:
            torch.cuda.set_sync_debug_mode(before)
    for warning in caught:
        text = str(warning.message)
        if "synchronizing CUDA operation" in text:
            waits.append(f"{warning.filename}:{warning.lineno} waits for the device")
        elif "Synchronization debug mode" not in text:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)


def captures_cuda(device: torch.device) -> Capture:
    """Return a function that captures CUDA graphs, which share one memory pool for temporary tensors."""
    own: list[Any] = []

    def capture(work: Callable[[], object]) -> Callable[[], object]:
        if not own:
            own.extend((torch.cuda.Stream(device), torch.cuda.graph_pool_handle()))
        (stream, pool), graph = own, torch.cuda.CUDAGraph()
        with torch.cuda.device(device):
            before = torch.cuda.current_stream(device)
            drawn = torch.cuda.get_rng_state(device)
            try:
                # thread_local permits other threads to allocate memory during the capture
                with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                    work()
            except BaseException:
                # return to the previous stream: torch before 2.12 stays on the stream of a failed capture
                torch.cuda.set_stream(before)
                _restore_generator(device, drawn)
                raise
            torch.cuda.set_stream(before)
            # torch sets the random generator's offset to 0 on `stream`; this must precede the first replay, which sets
            # its own offset
            before.wait_stream(stream)
        return graph.replay

    return capture


def _restore_generator(device: torch.device, drawn: torch.Tensor) -> None:
    """Reset the device's random generator to `drawn`, its state before a failed capture.

    torch before 2.12 leaves the generator in capture mode, in which it refuses to draw. Then the generator gets a new
    state object, and graphs captured earlier, which use the old object, must not be replayed any more.
    """
    generator = torch.cuda.default_generators[torch.empty(0, device=device).device.index]
    try:
        torch.rand(1, device=device)
    except RuntimeError:
        generator.graphsafe_set_state(torch.Generator(device))
    generator.set_state(drawn)
