"""Programmatic dependent launch (PDL): a kernel may start while its predecessor ends; used in captured decoding."""

from __future__ import annotations

import functools
import os
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tokenmix_core.kernels.launch.cache import driver
from tokenmix_core.kernels.launch.flags import flag

# the last parameter of kernels that support programmatic dependent launch
PDL = "PDL"
_VARIABLE, _OLD_VARIABLE = "TOKENMIX_PDL", "TOKENMIX_EARLY_LAUNCHES"
# CUDA version, as `driver.version` returns it, of the oldest driver that captures such launches: 12.3
_LEAST_DRIVER = 12_030


class _Enabled(threading.local):
    on = False


enabled = _Enabled()


def wanted() -> bool:
    """Return False if the environment variable `TOKENMIX_PDL` is 0, which disables PDL, else True.

    If the variable is set under its old name, `TOKENMIX_EARLY_LAUNCHES`, that value counts, with a warning.

    Raises:
        ValueError: the variable is neither 0 nor 1.
    """
    if _OLD_VARIABLE in os.environ:
        warnings.warn(f"{_OLD_VARIABLE} is now called {_VARIABLE}", FutureWarning, stacklevel=2)
    variable = _OLD_VARIABLE if _OLD_VARIABLE in os.environ else _VARIABLE
    return flag(variable, True, "launch every kernel after the one before it", "let kernels start early")


@contextmanager
def pdl_launches(device: torch.device) -> Iterator[None]:
    """Launch kernels with the parameter `PDL` by programmatic dependent launch, in this thread, inside the block.

    Before `gdc_wait` a kernel may read only data that neither an earlier kernel of the block nor the last kernel before
    the block writes: weights, and state that only this kernel updates. A block is one decoding step; its first kernel
    reads nothing before waiting. Nothing changes on GPUs before Hopper, with drivers before CUDA 12.3, on other
    devices, and if `TOKENMIX_PDL` is 0.
    """
    before, enabled.on = enabled.on, wanted() and device.type == "cuda" and _can(device.index)
    try:
        yield
    finally:
        enabled.on = before


@functools.cache
def _can(index: int | None) -> bool:
    if torch.version.hip is not None or torch.cuda.get_device_capability(index) < (9, 0):
        return False
    # older drivers cannot capture PDL launches in a CUDA graph
    return driver.version() >= _LEAST_DRIVER
