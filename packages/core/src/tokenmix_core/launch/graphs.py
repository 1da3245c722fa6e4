"""Work on a device that is recorded once and then repeated by a single launch: CUDA graphs, and the switch for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tokenmix_core.launch.switch import flag

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


def captures_cuda(device: torch.device) -> Capture:
    """A recorder of CUDA graphs, which share their memory for what is made and dropped inside of one."""
    own: list[Any] = []

    def capture(work: Callable[[], object]) -> Callable[[], object]:
        if not own:
            own.extend((torch.cuda.Stream(device), torch.cuda.graph_pool_handle()))
        (stream, pool), graph = own, torch.cuda.CUDAGraph()
        with torch.cuda.device(device):
            before = torch.cuda.current_stream(device)
            try:
                # other threads may go on allocating
                with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                    work()
            finally:
                # before 2.12 torch stays on the stream of a recording that failed
                torch.cuda.set_stream(before)
            # torch sets the random numbers' offset to 0 on that stream: not after the first repeat has set its own
            before.wait_stream(stream)
        return graph.replay

    return capture
