"""Select our attention kernels and their tiles, once per pass."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor

from tokenmix_core.chunking import cdiv
from tokenmix_core.kernels import tuning as device_tuning
from tokenmix_core.kernels.launch.cache.capture import is_real
from tokenmix_core.ops.dispatch import HALF, GluonForm
from tokenmix_core.ops.softmax_attention import tuning
from tokenmix_core.ops.softmax_attention.backends import on_hopper
from tokenmix_core.ops.softmax_attention.hopper import ROWS, TILE
from tokenmix_core.ops.softmax_attention.types import Mask

GLUON = GluonForm("attention", "tokenmix_core.ops.softmax_attention.hopper", slower="about 1.2 to 1.4 times slower")

# the warp-specialised forward may be used (see `plan`) if sequences have at least _LONG keys on average, and a window,
# if any, has at least _WIDE keys: it is faster by 2 % with a window of 1,024 keys, 8 % with 2,048 and 14 % without one
_LONG, _WIDE = 1024, 1024
# minimum scale for bias columns: with a smaller scale, −lse / scale (`bias_columns.py`) could overflow float32
MIN_SCALE = 2.0**-64


class Form(Enum):
    """A Gluon kernel: one warpgroup per CTA, or, in the forward pass only, warp-specialised with two consumers."""

    ONE = "one warpgroup"
    GROUPS = "warp-specialised"


class AttentionPlan(NamedTuple):
    """The tile of each portable kernel, or the Gluon kernel that runs instead.

    Attributes:
        forward: the kernel of o and the log-sum-exp.
        queries: the dQ kernel.
        keys: the dK/dV kernel.
    """

    forward: tuning.AttentionTile | Form
    queries: tuning.AttentionTile | Form
    keys: tuning.AttentionTile | Form


def plan(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, impl: str | None, *others: Tensor, cu_seqlens: Tensor | None = None,
    chosen: bool = False, scale: float = 1.0,
) -> AttentionPlan:  # fmt: skip
    """Return the plan of a call with these tensors.

    Args:
        q: queries.
        k: keys.
        v: values.
        mask: the keys that each query sees.
        impl: the argument of the public function.
        others: further tensors that the backward pass reads, such as do.
        cu_seqlens: boundaries of packed sequences.
        chosen: whether only selected queries are computed.
        scale: factor of the scores, for plans of a backward pass.

    Raises:
        ValueError: `impl` is "gluon" and Gluon kernels do not run.
    """
    (B, TQ, HQ, K), (_, TK, _, V) = q.shape, v.shape
    forward, queries, keys = (
        tuning.attention(name, max(K, V), q.dtype) for name in ("forward", "backward_queries", "backward_keys")
    )
    if not GLUON.runs(impl, q.device, q.dtype, limit(q, k, v, *others)):
        return AttentionPlan(forward, queries, keys)
    sequences = 1 if cu_seqlens is None else len(cu_seqlens) - 1

    wide = K == 128 and _LONG * sequences <= TK and (mask.window is None or mask.window >= _WIDE)
    # a warp-specialised CTA occupies a whole SM: use this kernel only if its CTAs fill three quarters of the SMs
    if wide and not chosen and 4 * B * HQ * cdiv(TQ, ROWS) >= 3 * device_tuning.sm_count(q.device):
        forward = Form.GROUPS
    elif not chosen:
        forward = Form.ONE
    if scale >= MIN_SCALE:
        keys = Form.ONE
    # with heads of 64, use the Gluon dQ kernel only if measured to be faster: unpacked, all queries, a window, and many
    # CTAs per SM. Without a window it is only 1 % faster, and spills on Triton 3.9
    dense = cu_seqlens is None and not chosen
    measured = mask.window is not None and dense and device_tuning.many_waves(B * HQ * cdiv(TQ, TILE))
    return AttentionPlan(forward, Form.ONE if K == 128 or measured else queries, keys)


def takes_gluon(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """True if Gluon kernels run on this device and support these tensors."""
    if torch.compiler.is_compiling() or not is_real(q):
        # tensors without data (fake or meta) have no addresses, so alignment cannot be checked
        return on_hopper() and q.dtype in HALF and q.shape[3] == v.shape[3] and q.shape[3] in (64, 128)
    return q.is_cuda and GLUON.runs(None, q.device, q.dtype, limit(q, k, v))


def limit(q: Tensor, k: Tensor, v: Tensor, *others: Tensor) -> str | None:
    """Return why Gluon kernels do not support these tensors `[B, T, H, D]`; None if Gluon kernels support them."""
    K, V = q.shape[3], v.shape[3]
    if K != V or K not in (64, 128):
        return f"takes K = V of 64 or 128, got K={K} and V={V}"
    return unreadable(q, k, v, *others)


def unreadable(*tensors: Tensor) -> str | None:
    """Return why Gluon kernels cannot copy rows of these tensors `[B, T, H, D]`; None if they can."""
    # tensors whose head elements are not contiguous are copied before the launch, so they need no check
    as_they_are = [x for x in tensors if x.stride(3) == 1]
    if any(x.data_ptr() % 16 or any(stride % 16 for stride in x.stride()[:3]) for x in as_they_are):
        return "takes tensors that begin at multiples of 16 bytes, with strides of multiples of 16 elements"
    return None
