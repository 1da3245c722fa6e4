"""The public functions: attention to the blocks of keys that each query lists, and the selection of blocks."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tokenmix_core.chunking import cdiv
from tokenmix_core.kernels import Checked
from tokenmix_core.ops import (
    AttentionOutput,
    Impl,
    bind_shapes,
    by_reference,
    check_cu_seqlens,
    check_dtype,
    check_multiple,
    check_same_dtype,
    check_scale,
    resolve_impl,
)
from tokenmix_lte.ops.selected_blocks import autograd
from tokenmix_lte.ops.selected_blocks.plan import limit
from tokenmix_lte.ops.selected_blocks.reference import block_attention_reference, select_blocks_reference

_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def block_attention(
    q: Float[Tensor, "B TQ HQ K"],
    k: Float[Tensor, "B TK H K"],
    v: Float[Tensor, "B TK H V"],
    blocks: Int[Tensor, "B TQ H S"],
    *,
    block_size: int = 64,
    scale: float | None = None,
    cu_seqlens: Int[Tensor, "N_plus_1"] | None = None,
    impl: Impl | None = None,
) -> AttentionOutput:
    """Compute causal softmax attention of each query to a list of blocks of keys; a query has one list per key head.

    Let i be the query's position counted in keys (the last query is at the last key), and S(i) the keys j ≤ i whose
    block ⌊j / block_size⌋ is listed in blocks[i]. Head h of k, v and `blocks` serves the HQ / H query heads from h · HQ
    / H on:

        lse_i = log Σ_{j ∈ S(i)} exp(scale · q_i · k_j)        o_i = Σ_{j ∈ S(i)} exp(scale · q_i · k_j − lse_i) v_j

    A block that is listed n times has n times the weight; negative entries and blocks after the query are ignored. A
    query that sees no key has o = 0 and lse = −∞. Time is proportional to the number of listed blocks. Differentiable
    in q, k and v through both outputs.

    Args:
        q, k, v: bfloat16, float16, float32 or float64, all of one dtype. HQ is a multiple of H.
        blocks: indices of blocks, int32 or int64, counted from the start of each query's sequence.
        block_size: number of keys in a block.
        scale: positive factor of the scores; None stands for K ** −0.5.
        cu_seqlens: boundaries of the packed sequences, `[N + 1]`, from 0 to at most T, for B = 1 and TQ = TK.
        impl: "triton" (blocks of 16, 32, 64 or 128 keys, heads up to 128), "reference", whose cost is proportional to
            T² for any number of listed blocks, or None: "triton" on CUDA if it supports the call, else "reference".

    Returns:
        o `[B, TQ, HQ, V]` in q's dtype; lse `[B, TQ, HQ]`, natural logarithm, float32 (float64 for float64 inputs).

    Raises:
        ValueError: a wrong shape, dtype, device or option, or an `impl` that does not support the call.
    """
    scale, impl = _check(q, k, v, blocks, block_size, scale, cu_seqlens, impl)
    if impl == "reference":
        options = {"block_size": block_size, "scale": scale, "cu_seqlens": cu_seqlens}
        return block_attention_reference(q, k, v, blocks, **options)
    x = autograd.Inputs(q=q, k=k, v=v, blocks=blocks, cu_seqlens=cu_seqlens, block_size=block_size, scale=scale)
    o, lse = autograd.block_attention(*x)
    return AttentionOutput(o, lse.transpose(1, 2))


def select_blocks(
    q: Float[Tensor, "B TQ HQ K"],
    pooled: Float[Tensor, "B U H K"],
    lse: Float[Tensor, "B TQ HQ"],
    count: int,
    *,
    block_size: int = 64,
    shift: int = 0,
    scale: float | None = None,
    cu_seqlens: Int[Tensor, "N_plus_1"] | None = None,
    impl: Impl | None = None,
) -> Int[Tensor, "B TQ H count"]:
    """Select `count` blocks per query: the first, its own, the one before it, and those with the most attention.

    The attention to a block c before the query's own block is Σ exp(scale · q · c̄ − lse) over the query heads of a key
    head, where c̄ is the block's pooled key and lse the log-sum-exp of the query's attention to pooled keys. Of two
    blocks with equal attention, the lower one is selected. No gradient passes.

    Args:
        q: bfloat16, float16, float32 or float64. HQ is a multiple of H.
        pooled: pooled keys of blocks, in the dtype of q; U is at least the number of blocks up to the last query. In a
            packed batch U is ⌊T / block_size⌋ + N, and sequence n's first block is ⌊cu_seqlens[n] / block_size⌋ + n.
        lse: float32, or float64 for float64 inputs.
        count: number of blocks per query, at least 3.
        shift: position of the first query; 0 with `cu_seqlens`.
        block_size, scale, cu_seqlens, impl: the same as for `block_attention`.

    Returns:
        Indices of blocks `[B, TQ, H, count]`, int32, in ascending order, padded with −1 if there are fewer.

    Raises:
        ValueError: a wrong shape, dtype, device or option, or an `impl` that does not support the call.
    """
    scale, impl = _check_selection(q, pooled, lse, count, block_size, shift, scale, cu_seqlens, impl)
    q, pooled, lse = q.detach(), pooled.detach(), lse.detach()
    if impl == "reference":
        options = {"block_size": block_size, "shift": shift, "scale": scale, "cu_seqlens": cu_seqlens}
        return select_blocks_reference(q, pooled, lse, count, **options)
    x = autograd.SelectInputs(
        q=q, pooled=pooled, lse=lse, cu_seqlens=cu_seqlens, count=count, block_size=block_size, shift=shift, scale=scale
    )
    return autograd.select_blocks(*x)


@Checked
def _check(q, k, v, blocks, block_size, scale, cu_seqlens, impl) -> tuple[float, str]:
    """Validate a call of `block_attention`; return the scale and the implementation."""
    op = "block_attention"
    dims = bind_shapes(
        op, {}, q=(q, "B TQ HQ K"), k=(k, "B TK H K"), v=(v, "B TK H V"), blocks=(blocks, "B TQ H S"),
        cu_seqlens=(cu_seqlens, "N_plus_1?"),
    )  # fmt: skip
    check_dtype(op, _FLOATS, q=q)
    check_same_dtype(op, q=q, k=k, v=v)
    check_dtype(op, (torch.int32, torch.int64), blocks=blocks)
    if dims["TQ"] > dims["TK"] or (cu_seqlens is not None and dims["TQ"] != dims["TK"]):
        wanted = "as many queries as keys with cu_seqlens" if cu_seqlens is not None else "at most as many as keys"
        raise ValueError(f"{op}: expected {wanted}, got TQ={dims['TQ']} and TK={dims['TK']}")
    return _options(op, dims, q, block_size, scale, cu_seqlens, impl, limit(dims["K"], dims["V"], block_size, q))


@Checked
def _check_selection(q, pooled, lse, count, block_size, shift, scale, cu_seqlens, impl) -> tuple[float, str]:
    """Validate a call of `select_blocks`; return the scale and the implementation."""
    op = "select_blocks"
    dims = bind_shapes(
        op, {}, q=(q, "B TQ HQ K"), pooled=(pooled, "B U H K"), lse=(lse, "B TQ HQ"),
        cu_seqlens=(cu_seqlens, "N_plus_1?"),
    )  # fmt: skip
    check_dtype(op, _FLOATS, q=q)
    check_same_dtype(op, q=q, pooled=pooled)
    check_dtype(op, (torch.float64 if q.dtype == torch.float64 else torch.float32,), lse=lse)
    if isinstance(count, bool) or not isinstance(count, int) or count < 3:
        raise ValueError(f"{op}: count must be an integer of at least 3, got {count!r}")
    if isinstance(shift, bool) or not isinstance(shift, int) or shift < 0 or (shift and cu_seqlens is not None):
        raise ValueError(f"{op}: shift must be an integer of at least 0, and 0 with cu_seqlens, got {shift!r}")
    result = _options(op, dims, q, block_size, scale, cu_seqlens, impl, limit(dims["K"], dims["K"], None, q))
    least = cdiv(dims["TQ"] + shift, block_size)
    if cu_seqlens is not None:
        least = dims["TQ"] // block_size + len(cu_seqlens) - 1
    if dims["U"] < least:
        raise ValueError(f"{op}: pooled must have at least U = {least} blocks, got {dims['U']}")
    return result


def _options(op, dims, q, block_size, scale, cu_seqlens, impl, why: str | None) -> tuple[float, str]:
    """Check options; return scale and implementation. `why`: why kernels do not support the call (None: they do)."""
    check_multiple(op, "HQ", dims["HQ"], "H", dims["H"])
    check_cu_seqlens(op, cu_seqlens, dims["B"], dims["TQ"])
    if isinstance(block_size, bool) or not isinstance(block_size, int) or block_size < 1:
        raise ValueError(f"{op}: block_size must be an integer of at least 1, got {block_size!r}")
    factor = dims["K"] ** -0.5 if scale is None else check_scale(op, scale)
    if not factor > 0:
        raise ValueError(f"{op}: scale must be positive, got {scale!r}")
    chosen = resolve_impl(op, impl, q)
    if chosen is None:
        return factor, "triton" if why is None else by_reference(op, why, q.device.type, q.dtype)
    if chosen == "triton" and why is not None:
        raise ValueError(f"{op}: impl='triton' {why}")
    return factor, chosen
