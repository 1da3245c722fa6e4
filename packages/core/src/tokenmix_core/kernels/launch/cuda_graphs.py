"""Work on a device that is recorded once and then repeated by a single launch: CUDA graphs, and the switch for them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tokenmix_core.kernels.launch.flags import flag

# records what a function does on the device without doing it; what is returned does it
Capture = Callable[[Callable[[], object]], Callable[[], object]]

_VARIABLE = "TOKENMIX_DECODING_GRAPH"


def wanted() -> bool:
    """Tell whether the environment leaves graphs on; a ValueError for what is neither 0 nor 1."""
    return flag(_VARIABLE, True, "launch every kernel", "repeat recorded steps")


def capture_on(device: torch.device) -> Capture | None:
    """The class that records work on a device; None where nothing can."""
    return captures_cuda(device) if device.type == "cuda" else None


def at_most_half_used(device: torch.device) -> bool:
    """Tell whether as much memory again as was in use at most would fit."""
    if device.type != "cuda":
        return True
    return 2 * torch.cuda.max_memory_allocated(device) <= torch.cuda.get_device_properties(device).total_memory


@contextmanager
def noting_waits(device: torch.device) -> Iterator[list[str]]:
    """Note what makes the host wait for the device, as far as torch tells: no recording could hold it."""
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
    """A recorder of CUDA graphs, which share their memory for what is made and dropped inside of one."""
    own: list[Any] = []

    def capture(work: Callable[[], object]) -> Callable[[], object]:
        if not own:
            own.extend((torch.cuda.Stream(device), torch.cuda.graph_pool_handle()))
        (stream, pool), graph = own, torch.cuda.CUDAGraph()
        with torch.cuda.device(device):
            before = torch.cuda.current_stream(device)
            drawn = torch.cuda.get_rng_state(device)
            try:
                # other threads may go on allocating
                with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                    work()
            except BaseException:
                # before 2.12 torch stays on the stream of a recording that failed
                torch.cuda.set_stream(before)
                _draw_again(device, drawn)
                raise
            torch.cuda.set_stream(before)
            # torch sets the random numbers' offset to 0 on that stream: not after the first repeat has set its own
            before.wait_stream(stream)
        return graph.replay

    return capture


def _draw_again(device: torch.device, drawn: torch.Tensor) -> None:
    """Give the device's generator the state from before a recording that failed.

    torch before 2.12 leaves it as one that is being recorded, which refuses to draw. A generator in its place has
    nothing to do with what was recorded before, which is not to be repeated any more.
    """
    generator = torch.cuda.default_generators[torch.empty(0, device=device).device.index]
    try:
        torch.rand(1, device=device)
    except RuntimeError:
        generator.graphsafe_set_state(torch.Generator(device))
    generator.set_state(drawn)
