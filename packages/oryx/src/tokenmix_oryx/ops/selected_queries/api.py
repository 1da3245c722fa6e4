"""The public function of attention for selected queries: it checks arguments and selects the implementation."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tokenmix_core.ops import (
    GLUON,
    Impl,
    bind_shapes,
    check_cu_seqlens,
    check_dtype,
    check_multiple,
    check_same_dtype,
    check_scale,
    limit,
    resolve_impl,
)
from tokenmix_oryx.ops.selected_queries.reference import selected_attention_by_runs

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
MAX_HEAD_SIZE = 256


def selected_attention(
    q: Float[Tensor, "B TQ HQ K"],
    k: Float[Tensor, "B TK H K"],
    v: Float[Tensor, "B TK H V"],
    selected: Bool[Tensor, "B TQ"],
    *,
    scale: float | None = None,
    cu_seqlens: Int[Tensor, "N_plus_1"] | None = None,
    impl: Impl | None = None,
) -> Float[Tensor, "B TQ HQ V"]:
    r"""Compute causal softmax attention for selected queries; the cost is proportional to their number.

    .. math:: o_i = \sum_{j \le i} e^{s_{ij} - \mathrm{lse}_i} v_j, \quad s_{ij} = \text{scale} \cdot q_i \cdot k_j
              \quad\text{for selected } i, \qquad o_i = 0 \text{ for others}

    The last query has the position of the last key. Head h of k and v serves the HQ / H query heads from h · HQ / H on.
    Differentiable in q, k and v; queries that are not selected get no gradient.

    Args:
        q, k, v: bfloat16, float16 or float32, all of one dtype (the reference also float64). HQ is a multiple of H,
            TQ at most TK.
        selected: True for the queries whose outputs are needed. Tiles without a selected query are skipped.
        scale: positive factor of the scores; None stands for K ** −0.5.
        cu_seqlens: boundaries of the packed sequences, `[N + 1]`, from 0 to at most T, for B = 1 and TQ = TK.
        impl: "gluon" (Hopper, bfloat16 or float16, K = V of 64 or 128; used for gradients only, because the Triton
            forward is as fast), "triton" (portable kernels; K and V up to 256), "reference" (core's eager attention for
            each run of adjacent selected queries), or None: Gluon if supported, then Triton on CUDA tensors, else
            core's fastest CPU attention for each run.

    Returns:
        o `[B, TQ, HQ, V]` in the dtype of q.

    Raises:
        ValueError: a wrong shape, dtype, device or option, or an `impl` that does not support the call.
    """
    op = "selected_attention"
    dims = bind_shapes(
        op, {}, q=(q, "B TQ HQ K"), k=(k, "B TK H K"), v=(v, "B TK H V"), selected=(selected, "B TQ"),
        cu_seqlens=(cu_seqlens, "N_plus_1?"),
    )  # fmt: skip
    chosen = resolve_impl(op, impl, q, GLUON)
    if chosen == "gluon" and not torch.compiler.is_compiling():
        GLUON.require(op, q.device, q.dtype, limit(q, k, v))
    check_dtype(op, (*FLOATS, torch.float64) if chosen == "reference" else FLOATS, q=q)
    check_same_dtype(op, q=q, k=k, v=v)
    check_dtype(op, (torch.bool,), selected=selected)
    check_multiple(op, "HQ", dims["HQ"], "H", dims["H"])
    check_cu_seqlens(op, cu_seqlens, dims["B"], dims["TQ"])
    if dims["TQ"] > dims["TK"] or (cu_seqlens is not None and dims["TQ"] != dims["TK"]):
        wanted = "as many queries as keys with cu_seqlens" if cu_seqlens is not None else "at most as many as keys"
        raise ValueError(f"{op}: expected {wanted}, got TQ={dims['TQ']} and TK={dims['TK']}")
    factor = dims["K"] ** -0.5 if scale is None else check_scale(op, scale)
    if not factor > 0:
        raise ValueError(f"{op}: scale must be positive, got {scale!r}")
    if chosen != "reference" and max(dims["K"], dims["V"]) > MAX_HEAD_SIZE:
        raise ValueError(
            f"{op}: impl={chosen or 'triton'!r} takes head sizes up to {MAX_HEAD_SIZE}, got K={dims['K']} and "
            f"V={dims['V']}; pass impl='reference'"
        )
    if chosen != "reference":
        from tokenmix_oryx.ops.selected_queries import autograd

        x = autograd.Inputs(q=q, k=k, v=v, selected=selected, cu_seqlens=cu_seqlens, scale=factor, impl=chosen)
        return autograd.selected_attention(*x)[0]
    return selected_attention_by_runs(q, k, v, selected, scale=factor, cu_seqlens=cu_seqlens, impl=impl)
