"""Which kernels of ours make attention forward and backward, and their tiles: decided here, once for a pass."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from tokenmix_core import tuning
from tokenmix_core.chunking import cdiv
from tokenmix_core.ops.choice import GluonForm
from tokenmix_core.ops.softmax_attention.backends import Mask
from tokenmix_core.ops.softmax_attention.hopper import TILE

GLUON = GluonForm("attention", "tokenmix_core.ops.softmax_attention.hopper", slower="about 1.2 times slower")

# blocks of queries a multiprocessor; with few each has more of it to itself in the portable kernel
_BLOCKS = 12


class AttentionPlan(NamedTuple):
    """The tile of each portable kernel, or None where one in Gluon runs.

    Attributes:
        forward: makes o and the log-sum-exp.
        queries: makes dq.
        keys: makes dk and dv.
    """

    forward: tuning.AttentionTile | None
    queries: tuning.AttentionTile | None
    keys: tuning.AttentionTile | None


def plan(q: Tensor, k: Tensor, v: Tensor, mask: Mask, impl: str | None, *others: Tensor) -> AttentionPlan:
    """The plan of a call with these tensors; `others` are those that the backward pass also reads by rows.

    Raises:
        ValueError: `impl` is "gluon" and kernels in Gluon do not run.
    """
    (B, TQ, HQ, K), V = q.shape, v.shape[3]
    forward, queries, keys = (
        tuning.attention(name, max(K, V), q.dtype) for name in ("forward", "backward_queries", "backward_keys")
    )
    if not GLUON.runs(impl, q.device, q.dtype, limit(q, k, v, *others)):
        return AttentionPlan(forward, queries, keys)
    enough = B * HQ * cdiv(TQ, TILE) >= _BLOCKS * tuning.multiprocessors(q.device)
    if mask.window is not None and (impl == "gluon" or enough):
        forward = None
    return AttentionPlan(forward, None if K == 128 else queries, None)


def limit(q: Tensor, k: Tensor, v: Tensor, *others: Tensor) -> str | None:
    """Why kernels in Gluon cannot read such tensors `[B, T, H, D]`; None where they can."""
    K, V = q.shape[3], v.shape[3]
    if K != V or K not in (64, 128):
        return f"takes K = V of 64 or 128, got K={K} and V={V}"
    return unreadable(q, k, v, *others)


def unreadable(*tensors: Tensor) -> str | None:
    """Why kernels in Gluon cannot copy rows of these tensors `[B, T, H, D]`; None where they can."""
    # rows whose elements do not lie side by side are copied first
    as_they_are = [x for x in tensors if x.stride(3) == 1]
    if any(x.data_ptr() % 16 or any(stride % 16 for stride in x.stride()[:3]) for x in as_they_are):
        return "takes tensors that begin at multiples of 16 bytes, with strides of multiples of 16 elements"
    return None
