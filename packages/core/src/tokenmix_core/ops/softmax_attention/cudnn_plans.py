"""Shapes that recur often enough for cuDNN, which makes a plan for each.

A plan takes 50 ms each way (H100, torch 2.11), as long as hundreds of calls, and torch keeps it for ever. While shapes
are new, our kernels run where cuDNN's would lead; with lengths that do not return, cuDNN's never do.
"""

from __future__ import annotations

from torch import Tensor

from tokenmix_core.kernels.launch.cache.admission import keep_last
from tokenmix_core.kernels.launch.cache.capture import is_plain
from tokenmix_core.ops.softmax_attention.backends import OURS, limit
from tokenmix_core.ops.softmax_attention.types import Mask, call_of

# calls of a shape before a plan pays, and shapes whose calls are counted
_CALLS, _SHAPES = 100, 16
# by shapes and dtype, how many calls there were; the shape used last at the end
_calls: dict[tuple, int] = {}


def kernels_before_plan(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> str | None:
    """Return `OURS`, for both passes, while cuDNN should make no plan for such an unpacked call; else None."""
    if not is_plain(q):
        return None
    shape = q.shape, k.shape, v.shape, q.dtype, mask
    calls = _calls.pop(shape, 0)
    _calls[shape] = calls = min(calls + 1, _CALLS + 1)
    keep_last(_calls, _SHAPES)
    if calls > _CALLS:
        return None
    return OURS if limit("triton", call_of(q, k, v, mask, False)) is None else None


def forget() -> None:
    """Reset the counts of all calls."""
    _calls.clear()
