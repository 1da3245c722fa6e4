"""Read a value from the device without waiting for kernels that are launched after the kernel that computes it."""

from __future__ import annotations

from torch import Tensor
from torch.cuda import current_stream


class Asked:
    """An integer that is copied to the host: the constructor starts the copy, `read` waits for it.

    `read` waits only for kernels launched before the constructor. Kernels launched after it keep the device busy
    meanwhile, whereas `int(x)` would wait for all of them.

    Args:
        x: a tensor of one element.
    """

    def __init__(self, x: Tensor) -> None:
        # on a GPU copy to pinned memory without blocking; elsewhere clone, because x may change before it is read
        self._copy = x.detach().to("cpu", non_blocking=True) if x.is_cuda else x.detach().clone()
        self._arrived = current_stream(x.device).record_event() if x.is_cuda else None

    def read(self) -> int:
        """Wait for the copy, and return the integer."""
        if self._arrived is not None:
            self._arrived.synchronize()
            self._arrived = None
        return int(self._copy)
