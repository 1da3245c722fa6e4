"""Capture and replay CUDA graphs, and the environment variable that disables them in decoding."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tokenmix_core.kernels.launch.flags import flag

# captures the device work of a function without executing it; the returned function replays it
Capture = Callable[[Callable[[], object]], Callable[[], object]]

_VARIABLE = "TOKENMIX_DECODING_GRAPH"


def wanted() -> bool:
    """Tell whether the environment permits graphs; raise a ValueError for a value other than 0 and 1."""
    return flag(_VARIABLE, True, "launch every kernel", "replay captured steps")


def capture_on(device: torch.device) -> Capture | None:
    """Return the function that captures work on a device; None if the device has no graphs."""
    return captures_cuda(device) if device.type == "cuda" else None


def at_most_half_used(device: torch.device) -> bool:
    """Tell whether the peak of allocated memory so far is at most half of the device's memory."""
    if device.type != "cuda":
        return True
    return 2 * torch.cuda.max_memory_allocated(device) <= torch.cuda.get_device_properties(device).total_memory


@contextmanager
def noting_waits(device: torch.device) -> Iterator[list[str]]:
    """Collect the host's synchronisations with the device that torch reports: a graph cannot contain them."""
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
                # thread_local: other threads may allocate during the capture
                with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                    work()
            except BaseException:
                # before 2.12 torch stays on the stream of a failed capture
                torch.cuda.set_stream(before)
                _restore_generator(device, drawn)
                raise
            torch.cuda.set_stream(before)
            # torch sets the generator's offset to 0 on `stream`; the first replay, which sets its own, must come later
            before.wait_stream(stream)
        return graph.replay

    return capture


def _restore_generator(device: torch.device, drawn: torch.Tensor) -> None:
    """Restore the generator's state from before a failed capture.

    torch before 2.12 leaves the generator in capture mode, in which it refuses to draw. A new state then replaces the
    generator's, and graphs captured before must not be replayed any more.
    """
    generator = torch.cuda.default_generators[torch.empty(0, device=device).device.index]
    try:
        torch.rand(1, device=device)
    except RuntimeError:
        generator.graphsafe_set_state(torch.Generator(device))
    generator.set_state(drawn)
