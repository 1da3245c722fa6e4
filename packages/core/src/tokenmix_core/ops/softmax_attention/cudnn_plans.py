"""Decide which shapes recur often enough for cuDNN, which makes an execution plan for each shape.

Making a plan takes 50 ms per pass (H100, torch 2.11), as long as hundreds of calls, and torch never frees a plan. So
our kernels run the first calls of a shape even if cuDNN is faster; if lengths never recur, cuDNN never runs.
"""

from __future__ import annotations

from torch import Tensor

from tokenmix_core.kernels.launch.cache.admission import keep_last
from tokenmix_core.kernels.launch.cache.capture import is_plain
from tokenmix_core.ops.softmax_attention.backends import OURS, limit
from tokenmix_core.ops.softmax_attention.types import Mask, call_of

# our kernels run this number of calls of a shape before cuDNN does; calls are counted for this number of shapes
_CALLS, _SHAPES = 100, 16
# maps shapes, dtype and mask to the number of calls, in the order of last use
_calls: dict[tuple, int] = {}


def kernels_before_plan(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> str | None:
    """Return `OURS` if an unpacked call of this shape is too rare for a cuDNN plan and fits our kernels, else None.

    `OURS` selects our kernels for both passes. The call is counted.
    """
    if not is_plain(q):
        return None
    shape = q.shape, k.shape, v.shape, q.dtype, mask
    calls = _calls.pop(shape, 0)
    _calls[shape] = calls = min(calls + 1, _CALLS + 1)
    keep_last(_calls, _SHAPES)
    if calls > _CALLS:
        return None
    return OURS if limit("triton", call_of(q, k, v, mask, False)) is None else None


def reset() -> None:
    """Set the number of calls of every shape to 0."""
    _calls.clear()
