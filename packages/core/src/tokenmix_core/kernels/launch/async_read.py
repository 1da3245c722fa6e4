"""Copies between host and device that do not make the host wait for kernels launched before or after them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.cuda import current_stream


class Asked:
    """A tensor that is copied to the host: the constructor starts the copy, `read` and `read_list` wait for it.

    They wait only for kernels launched before the constructor. Kernels launched after it keep the device busy
    meanwhile, whereas `int(x)` or `x.tolist()` would wait for all of them.

    Args:
        x: a tensor.
    """

    def __init__(self, x: Tensor) -> None:
        # on a GPU copy to pinned memory without blocking; elsewhere clone, because x may change before it is read
        self._copy = x.detach().to("cpu", non_blocking=True) if x.is_cuda else x.detach().clone()
        self._arrived = current_stream(x.device).record_event() if x.is_cuda else None

    def read(self) -> int:
        """Wait for the copy of a tensor of one element, and return this integer."""
        return int(self._arrived_copy())

    def read_list(self) -> list[Any]:
        """Wait for the copy, and return its elements as a list."""
        return self._arrived_copy().tolist()

    def _arrived_copy(self) -> Tensor:
        if self._arrived is not None:
            self._arrived.synchronize()
            self._arrived = None
        return self._copy


def to_device(values: Sequence[Any], device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Return `torch.tensor(values, device=device)`; the host does not wait for the device's earlier kernels."""
    if device.type != "cuda":
        return torch.tensor(values, dtype=dtype, device=device)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)
