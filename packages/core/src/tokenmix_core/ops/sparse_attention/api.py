"""Softmax attention over a local part and kept far keys: the public function."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tokenmix_core.chunking import cdiv
from tokenmix_core.kernels.launch.cache.replay import Checked
from tokenmix_core.ops.checks import (
    bind_shapes,
    check_cu_seqlens,
    check_dtype,
    check_multiple,
    check_same_dtype,
    check_scale,
)
from tokenmix_core.ops.softmax_attention.backends import limit
from tokenmix_core.ops.softmax_attention.types import Call, Mask
from tokenmix_core.ops.sparse_attention import autograd, plan
from tokenmix_core.ops.sparse_attention.query_blocks import kept_attention_by_stretches, takes_stretches
from tokenmix_core.ops.types import AttentionOutput, Impl

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
    impl: Impl | None = None,
) -> AttentionOutput:
    """Softmax attention to a local part and to those keys before it that are kept, under one softmax.

    With i the query's position counted in keys (the last query stands at the last key) and left(i) = i − window + 1, or
    without a window the start of i's own unit, query i sees

        j with left(i) ≤ j ≤ i, and j < left(i) where keep[unit of j] and i < until[j].

    Outputs are those of `attention` over these keys. Time and memory follow the number of pairs that are seen; where
    keys end (`until`) and gradients are wanted, or sequences are packed, that of pairs with kept keys.
    Differentiable in q, k and v through both outputs, and in a float `keep`: a kept unit's gradient is that of a factor
    of one before the exponentials of its far pairs; that of other units is 0.

    Args:
        q, k, v: bfloat16, float16, float32 or float64, all of one dtype. HQ is a multiple of H.
        keep: marks of the units, bool, or a float that counts as kept above ½. H is a multiple of HM, and a head of
            `keep` serves H / HM heads of k side by side. U is ⌈TK / unit⌉. In a packed batch units are counted from
            each sequence's start: single tokens are in their places; of chunks, U is ⌊TK / unit⌋ + N, sequence n's
            first is ⌊cu_seqlens[n] / unit⌋ + n, and what lies between the sequences' units is ignored.
        unit: tokens in a unit: 1, or a multiple of 64.
        window: how many keys the local part holds, the query's own included; None: the query's own unit up to itself.
        until: position, counted as the queries' are, of the first query that no longer sees a kept key; int32 or int64.
        scale: factor of the scores, positive; None is K ** −0.5.
        cu_seqlens: boundaries of the packed sequences, `[N + 1]`, from 0 to T, for B = 1 and TQ = TK.
        impl: "triton" (heads up to 256), "reference", "gluon", our kernels for Hopper (bfloat16 or float16, K and V of
            64 or 128, no `until`), or None, the fastest that takes the call; with K = 128 Gluon has to be asked for.

    Returns:
        o `[B, TQ, HQ, V]` in the dtype of q; lse `[B, TQ, HQ]`, natural logarithm, float32 (float64 for float64).

    Raises:
        ValueError: a wrong shape, dtype, device or option, or an `impl` that cannot do what is asked.
    """
    window, scale, impl = _check(q, k, v, keep, unit, window, until, scale, cu_seqlens, impl)
    x = autograd.Inputs(
        q=q, k=k, v=v, keep=keep, until=until, cu_seqlens=cu_seqlens, unit=unit, window=window, scale=scale, impl=impl
    )
    o, lse = kept_attention_by_stretches(x) if takes_stretches(x) else autograd.kept_attention(*x)
    return AttentionOutput(o, lse.transpose(1, 2))


@Checked
def _check(q, k, v, keep, unit, window, until, scale, cu_seqlens, impl) -> tuple[int | None, float, str | None]:
    """Validate a call; return the window that tells apart, the scale and the implementation."""
    op = "kept_attention"
    dims = bind_shapes(
        op, {}, q=(q, "B TQ HQ K"), k=(k, "B TK H K"), v=(v, "B TK H V"), keep=(keep, "B U HM"),
        until=(until, "B TK H?"),
    )  # fmt: skip
    check_dtype(op, _FLOATS, q=q)
    check_same_dtype(op, q=q, k=k, v=v)
    check_dtype(op, (torch.bool, *_FLOATS), keep=keep)
    check_dtype(op, (torch.int32, torch.int64), until=until)
    check_multiple(op, "HQ", dims["HQ"], "H", dims["H"])
    check_multiple(op, "H", dims["H"], "HM", dims["HM"])
    if isinstance(unit, bool) or not isinstance(unit, int) or unit < 1 or (unit > 1 and unit % 64):
        raise ValueError(f"{op}: unit must be 1 or a multiple of 64, got {unit!r}")
    if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < 1):
        raise ValueError(f"{op}: window must be None or an integer of at least 1, got {window!r}")
    _check_packed(op, dims, q, cu_seqlens)
    units = cdiv(dims["TK"], unit)
    if cu_seqlens is not None and unit > 1:
        units = dims["TK"] // unit + len(cu_seqlens) - 1
    if dims["U"] != units:
        rule = "⌈TK / unit⌉" if cu_seqlens is None or unit == 1 else "⌊TK / unit⌋ + N"
        raise ValueError(
            f"{op}: keep must have U = {rule} = {units} units for TK={dims['TK']} and unit={unit}, got {dims['U']}"
        )
    factor = dims["K"] ** -0.5 if scale is None else check_scale(op, scale)
    if not factor > 0:
        raise ValueError(f"{op}: scale must be positive, got {scale!r}")
    # behind a window that holds every key nothing is far
    window = None if window is None else min(window, max(1, dims["TK"]))
    mask, packed = Mask(True, window, 0), cu_seqlens is not None
    call = Call(q.device.type, q.dtype, dims["TQ"], dims["TK"], dims["K"], dims["V"], mask, packed)
    if impl is None:
        impl = None if q.is_cuda and limit("triton", call) is None else "reference"
    elif impl == "gluon":
        if not torch.compiler.is_compiling():
            plan.GLUON.require(op, q.device, q.dtype, plan.limit(q, k, v, until))
    elif impl not in ("triton", "reference"):
        raise ValueError(f"{op}: impl must be None, 'gluon', 'triton' or 'reference', got {impl!r}")
    elif (why := limit(impl, call)) is not None:
        raise ValueError(f"{op}: impl={impl!r} {why}")
    return window, factor, impl


def _check_packed(op, dims, q, cu_seqlens) -> None:
    check_cu_seqlens(op, cu_seqlens, dims["B"], dims["TQ"])
    if cu_seqlens is not None:
        bind_shapes(op, {}, q=(q, "B TQ HQ K"), cu_seqlens=(cu_seqlens, "N_plus_1"))
        if dims["TQ"] != dims["TK"]:
            raise ValueError(f"{op}: cu_seqlens needs as many queries as keys, got TQ={dims['TQ']} and TK={dims['TK']}")
