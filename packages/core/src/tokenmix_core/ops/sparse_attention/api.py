"""Public function of softmax attention over local keys and the retained ones among all earlier keys."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tokenmix_core.chunking import cdiv
from tokenmix_core.kernels.launch.cache.replay import Checked
from tokenmix_core.ops import checks
from tokenmix_core.ops.dispatch import by_reference
from tokenmix_core.ops.softmax_attention.backends import limit
from tokenmix_core.ops.softmax_attention.types import Call, Mask
from tokenmix_core.ops.sparse_attention import autograd, plan
from tokenmix_core.ops.sparse_attention.query_blocks import kept_attention_by_blocks, takes_blocks
from tokenmix_core.ops.types import AttentionOutput, Impl

KeepGradient = Literal["exponentials", "values"]
_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def kept_attention(
    q: Float[Tensor, "B TQ HQ K"],
    k: Float[Tensor, "B TK H K"],
    v: Float[Tensor, "B TK H V"],
    keep: Bool[Tensor, "B U HM"] | Float[Tensor, "B U HM"],
    *,
    unit: int = 1,
    window: int | None = None,
    until: Int[Tensor, "B TK H"] | None = None,
    scale: float | None = None,
    cu_seqlens: Int[Tensor, "N_plus_1"] | None = None,
    keep_gradient: KeepGradient = "exponentials",
    impl: Impl | None = None,
) -> AttentionOutput:
    """Compute softmax attention to local keys and to the retained keys before them, under one softmax.

    Let i be the query's position counted in keys (the last query is at the last key), and left(i) = i − window + 1, or
    without a window the start of i's own unit. Query i sees

        j with left(i) ≤ j ≤ i, and j < left(i) if keep[unit of j] and i < until[j].

    Outputs are those of `attention` over these keys. Time and memory are linear in the number of visible pairs; with
    `until`, pairs with evicted keys also count if gradients are wanted or sequences are packed. Differentiable in q, k
    and v through both outputs, and in a float `keep`, whose gradient is that of a factor of 1 (`keep_gradient`).

    Args:
        q, k, v: bfloat16, float16, float32 or float64, all of one dtype. HQ is a multiple of H.
        keep: whether each unit of keys is retained, bool, or a float: retained if above ½. H is a multiple of HM, and a
            head of `keep` serves H / HM adjacent heads of k. U is ⌈TK / unit⌉. In a packed batch units are counted
            from each sequence's start. If unit > 1, U is then ⌊TK / unit⌋ + N, the first unit of sequence n has index
            ⌊cu_seqlens[n] / unit⌋ + n, and elements of `keep` between two sequences' units are ignored.
        unit: number of consecutive keys in a unit: 1, or a multiple of 64.
        window: number of local keys, the query's own included; None: the keys of the query's own unit up to the query.
        until: the position of the first query that no longer sees the key as a retained one; int32 or int64.
        scale: factor of the scores, positive; None: K ** −0.5.
        cu_seqlens: boundaries of the packed sequences, `[N + 1]`, from 0 to at most T, for B = 1 and TQ = TK.
        keep_gradient: the factor of 1 whose gradient a float `keep` gets. "exponentials": a factor of the exponentials
            of a retained unit's pairs that are not local; the gradient of other units is 0. "values": a factor of the
            values of each unit, retained or not; the gradient is the sum of ⟨v_j, dv_j⟩ over the unit's keys and the
            heads that share it, in float32.
        impl: "triton" (heads up to 256), "reference", "gluon", our kernels for Hopper (bfloat16 or float16, K and V of
            64 or 128, no `until`), or None, the fastest that supports the call; with K = 128 only "gluon" selects
            Gluon.

    Returns:
        o `[B, TQ, HQ, V]` in the dtype of q; lse `[B, TQ, HQ]`, natural logarithm, float32 (float64 for float64).

    Raises:
        ValueError: a wrong shape, dtype, device or option, or an `impl` that does not support the call.
    """
    window, scale, impl = _check(q, k, v, keep, unit, window, until, scale, cu_seqlens, keep_gradient, impl)
    x = autograd.Inputs(
        q=q, k=k, v=v, keep=keep, until=until, cu_seqlens=cu_seqlens, unit=unit, window=window, scale=scale,
        keep_gradient=keep_gradient, impl=impl,
    )  # fmt: skip
    o, lse = kept_attention_by_blocks(x) if takes_blocks(x) else autograd.kept_attention(*x)
    return AttentionOutput(o, lse.transpose(1, 2))


@Checked
def _check(
    q, k, v, keep, unit, window, until, scale, cu_seqlens, keep_gradient, impl
) -> tuple[int | None, float, str | None]:
    """Validate a call; return the clamped window, the scale and the implementation."""
    op = "kept_attention"
    dims = checks.bind_shapes(
        op, {}, q=(q, "B TQ HQ K"), k=(k, "B TK H K"), v=(v, "B TK H V"), keep=(keep, "B U HM"),
        until=(until, "B TK H?"),
    )  # fmt: skip
    checks.check_dtype(op, _FLOATS, q=q)
    checks.check_same_dtype(op, q=q, k=k, v=v)
    checks.check_dtype(op, (torch.bool, *_FLOATS), keep=keep)
    checks.check_dtype(op, (torch.int32, torch.int64), until=until)
    checks.check_multiple(op, "HQ", dims["HQ"], "H", dims["H"])
    checks.check_multiple(op, "H", dims["H"], "HM", dims["HM"])
    if isinstance(unit, bool) or not isinstance(unit, int) or unit < 1 or (unit > 1 and unit % 64):
        raise ValueError(f"{op}: unit must be 1 or a multiple of 64, got {unit!r}")
    if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < 1):
        raise ValueError(f"{op}: window must be None or an integer of at least 1, got {window!r}")
    if keep_gradient not in get_args(KeepGradient):
        raise ValueError(f"{op}: keep_gradient must be 'exponentials' or 'values', got {keep_gradient!r}")
    checks.check_packed_queries(op, dims, q, cu_seqlens)
    units = cdiv(dims["TK"], unit)
    if cu_seqlens is not None and unit > 1:
        units = dims["TK"] // unit + len(cu_seqlens) - 1
    if dims["U"] != units:
        rule = "⌈TK / unit⌉" if cu_seqlens is None or unit == 1 else "⌊TK / unit⌋ + N"
        raise ValueError(
            f"{op}: keep must have U = {rule} = {units} units for TK={dims['TK']} and unit={unit}, got {dims['U']}"
        )
    factor = dims["K"] ** -0.5 if scale is None else checks.check_scale(op, scale)
    if not factor > 0:
        raise ValueError(f"{op}: scale must be positive, got {scale!r}")
    # clamp the window: one of all keys and a larger one are equivalent
    window = None if window is None else min(window, max(1, dims["TK"]))
    mask, packed = Mask(True, window, 0), cu_seqlens is not None
    call = Call(q.device.type, q.dtype, dims["TQ"], dims["TK"], dims["K"], dims["V"], mask, packed)
    if impl is None:
        why = limit("triton", call)
        impl = None if q.is_cuda and why is None else by_reference(op, why, q.device.type, q.dtype)
    elif impl == "gluon":
        if not torch.compiler.is_compiling():
            plan.GLUON.require(op, q.device, q.dtype, plan.limit(q, k, v, until))
    elif impl not in ("triton", "reference"):
        raise ValueError(f"{op}: impl must be None, 'gluon', 'triton' or 'reference', got {impl!r}")
    elif (why := limit(impl, call)) is not None:
        raise ValueError(f"{op}: impl={impl!r} {why}")
    return window, factor, impl
