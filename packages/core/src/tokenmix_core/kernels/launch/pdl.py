"""Launches that may begin while the one ahead of them ends: asked for around steps that are recorded and repeated."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tokenmix_core.kernels.launch.cache import driver
from tokenmix_core.kernels.launch.flags import flag

# the last parameter of kernels that support programmatic dependent launch
PDL = "PDL"
_VARIABLE = "TOKENMIX_EARLY_LAUNCHES"
# CUDA 12.3
_LEAST_DRIVER = 12_030


class _Asked(threading.local):
    on = False


asked = _Asked()


def wanted() -> bool:
    """Tell whether the environment leaves early launches on; a ValueError for what is neither 0 nor 1."""
    return flag(_VARIABLE, True, "begin every launch after the one ahead of it", "begin where there is room")


@contextmanager
def beginning_early(device: torch.device) -> Iterator[None]:
    """Let kernels that know how to wait begin early, in launches of this thread: those with the parameter `PDL`.

    What such a kernel reads before it waits must not have been written by an earlier launch of the block, nor by the
    last one before it: the weights of a model, and a state that this kernel alone writes, once a step. So a block is
    one step, and a kernel that begins in turn comes first. On GPUs before Hopper, with drivers before CUDA 12.3 and on
    other devices nothing changes.
    """
    before, asked.on = asked.on, wanted() and device.type == "cuda" and _can(device.index)
    try:
        yield
    finally:
        asked.on = before


@functools.cache
def _can(index: int | None) -> bool:
    if torch.version.hip is not None or torch.cuda.get_device_capability(index) < (9, 0):
        return False
    # older drivers do not record such launches
    return driver.version() >= _LEAST_DRIVER
