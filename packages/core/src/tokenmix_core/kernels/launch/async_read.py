"""Numbers that the host needs from the device, without waiting for what was launched after them."""

from __future__ import annotations

from torch import Tensor
from torch.cuda import current_stream


class Asked:
    """A whole number on its way to the host: asked for when this is made, waited for when it is read.

    Reading waits for what was launched before the question alone. What is launched between the two keeps the device at
    work meanwhile, where `int(x)` at the end would wait until nothing is left to do.

    Args:
        x: a tensor of one number.
    """

    def __init__(self, x: Tensor) -> None:
        # on a GPU a copy that does not block, to pinned memory; elsewhere x may change before it is read
        self._copy = x.detach().to("cpu", non_blocking=True) if x.is_cuda else x.detach().clone()
        self._arrived = current_stream(x.device).record_event() if x.is_cuda else None

    def read(self) -> int:
        """The number."""
        if self._arrived is not None:
            self._arrived.synchronize()
            self._arrived = None
        return int(self._copy)
