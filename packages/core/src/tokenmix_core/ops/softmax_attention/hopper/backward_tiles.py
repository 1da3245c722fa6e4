"""Stages, resident operands and MMAs of the Hopper backward kernels of dense and sparse attention.

In sparse attention "keys are listed": a KV tile of the dK/dV kernel is gathered by a list of key positions.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, warpgroup_mma, warpgroup_mma_wait

from tokenmix_core.kernels.gluon import hopper
from tokenmix_core.kernels.gluon.hopper import LOG2_E
from tokenmix_core.kernels.triton.masks import visible, within
from tokenmix_core.ops.softmax_attention.hopper.bias_columns import allocate_bias
from tokenmix_core.ops.softmax_attention.steps import Rows


class KeyStage(NamedTuple):
    """smem buffers of one pipeline stage of the dQ kernel: a KV tile."""

    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor


class QueryStage(NamedTuple):
    """smem buffers of one pipeline stage of the dK/dV kernel: a query tile."""

    q: gl.shared_memory_descriptor
    do: gl.shared_memory_descriptor
    bias: gl.shared_memory_descriptor


class Keys(NamedTuple):
    """Operands that the dK/dV kernel holds during its loop: KV tile, bias selectors (smem), key positions, scale."""

    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    adds_lse: gl.shared_memory_descriptor
    adds_delta: gl.shared_memory_descriptor
    o_k: gl.tensor
    scale: gl.tensor


class Queries(NamedTuple):
    """Operands that the dQ kernel holds in its loop: Q and dO tiles (smem), lse in base 2, delta, positions, scale."""

    q: gl.shared_memory_descriptor
    do: gl.shared_memory_descriptor
    b_lse: gl.tensor
    b_delta: gl.tensor
    o_q: gl.tensor
    scale: gl.tensor


class Heads(NamedTuple):
    """q, do and bias of the first query head of a GQA group, as `Rows`, and the strides between heads."""

    q: Rows
    do: Rows
    bias: Rows
    strides: gl.tuple


class QuerySpan(NamedTuple):
    """The query tiles that a KV tile visits in each query head of its group (see `query_tiles`).

    Attributes:
        queries: number of queries of the sequence.
        m_min: first query tile.
        full_min: first query tile that needs no mask.
        full_max: first masked query tile after the unmasked ones.
        m_max: end of the query tiles.
        count: number of query tiles of all heads of the GQA group.
        order: list of the query tiles to visit; None for all query tiles.
        mask: `VisibleTo` or `ColumnsVisibleTo`.
    """

    queries: gl.tensor
    m_min: gl.tensor
    full_min: gl.tensor
    full_max: gl.tensor
    m_max: gl.tensor
    count: gl.tensor
    order: gl.tensor
    mask: gl.tuple


class Masking(NamedTuple):
    """Compile-time properties of a mask; pass a `Masking(…)` expression: a variable's fields would become tensors."""

    CAUSAL: gl.constexpr
    WINDOW: gl.constexpr
    LISTED: gl.constexpr


@gluon.jit
def allocate_keys(dtype: gl.constexpr, BT: gl.constexpr, K: gl.constexpr, V: gl.constexpr):
    """Allocate the smem buffers of one stage for a KV tile."""
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    return KeyStage(
        gl.allocate_shared_memory(dtype, [BT, K], shared), gl.allocate_shared_memory(dtype, [BT, V], shared)
    )


@gluon.jit
def allocate_queries(dtype: gl.constexpr, BT: gl.constexpr, K: gl.constexpr, V: gl.constexpr):
    """Allocate the smem buffers of one stage for a query tile."""
    q_s, do_s = allocate_keys(dtype, BT, K, V)
    return QueryStage(q_s, do_s, allocate_bias(BT))


@gluon.jit
def minus_columns(b_row, columns: gl.constexpr):
    """Return `b_row[i] − j` for row i and column j; a thread adds constants to the value of its first column."""
    o_c = gl.arange(0, columns, gl.SliceLayout(0, hopper.mma_layout(columns, gl.num_warps())))[None, :]
    return b_row[:, None] - o_c % 8 - o_c // 8 * 8


@gluon.jit
def plus_columns(b_row, columns: gl.constexpr):
    """Return `b_row[i] + j` for row i and column j; a thread adds constants to the value of its first column.

    `b_row` is made opaque: Triton's axis analysis wrongly infers that a multiple of 16 minus row indices 0, 1, … is a
    multiple of 16, and would then make one comparison for several columns.
    """
    o_c = gl.arange(0, columns, gl.SliceLayout(0, hopper.mma_layout(columns, gl.num_warps())))
    return hopper.opaque(b_row)[:, None] + (o_c % 8)[None, :] + (o_c // 8 * 8)[None, :]


@gluon.jit
def async_copy_queries(stage: QueryStage, heads: Heads, i_h, first, queries):
    """Start and commit async copies of the query tile that begins at row `first`, of the group's `i_h`-th head."""
    i_h = i_h.to(gl.int64)
    q, do, bias = heads.q, heads.do, heads.bias
    s_q, s_do, s_bias = heads.strides
    hopper.async_copy_tile(stage.q, q.pointer + i_h * s_q, first, queries, q.stride, THREAD_RELATIVE=True)
    hopper.async_copy_tile(stage.do, do.pointer + i_h * s_do, first, queries, do.stride, THREAD_RELATIVE=True)
    hopper.async_copy_tile(stage.bias, bias.pointer + i_h * s_bias, first, queries, bias.stride, THREAD_RELATIVE=True)
    async_copy.commit_group()


@gluon.jit
def advance(i_q, i_h, m_min, m_max):
    """Return the query tile that a KV tile visits after tile `i_q` of head `i_h`, and that next tile's head."""
    last = i_q + 1 == m_max
    return gl.where(last, m_min, i_q + 1), i_h + gl.where(last, 1, 0)


@gluon.jit
def mma_scores(given: Queries, k_s, v_s):
    """Start the WGMMAs of S = Q Kᵀ, then of dP = dO Vᵀ; return both pending accumulators."""
    BT: gl.constexpr = k_s.shape[0]
    zeros = gl.zeros([BT, BT], gl.float32, hopper.mma_layout(BT, gl.num_warps()))
    b_s = warpgroup_mma(hopper.opaque_tile(given.q), k_s.permute((1, 0)), zeros, use_acc=False, is_async=True)
    b_dp = warpgroup_mma(hopper.opaque_tile(given.do), v_s.permute((1, 0)), zeros, use_acc=False, is_async=True)
    return b_s, b_dp


@gluon.jit
def mma_dq(b_p, b_dp, given: Queries, k_s, b_dq):
    """Wait for dP and return dQ + dS K with dS = P ∘ (dP − delta) for probabilities P."""
    b_dp = warpgroup_mma_wait(0, [b_dp])
    b_ds = (b_p * (b_dp - given.b_delta[:, None])).to(k_s.dtype)
    sums: gl.constexpr = hopper.mma_layout(k_s.shape[1], gl.num_warps())
    b_ds = gl.convert_layout(b_ds, gl.DotOperandLayout(0, sums, 2))
    b_dq = warpgroup_mma(b_ds, k_s, b_dq, is_async=True)
    # listing b_ds in deps keeps its registers live until the WGMMA has read them
    b_dq, b_ds = warpgroup_mma_wait(0, [b_dq, b_ds])
    return b_dq


@gluon.jit
def mma_scores_transposed(given: Keys, stage: QueryStage):
    """Start the WGMMAs of K Qᵀ − lse / scale, then of V dOᵀ − delta; return both pending accumulators."""
    BN: gl.constexpr = given.k.shape[0]
    BM: gl.constexpr = stage.q.shape[0]
    zeros = gl.zeros([BN, BM], gl.float32, hopper.mma_layout(BM, gl.num_warps()))
    b_bias = stage.bias.permute((1, 0))
    b_st = warpgroup_mma(given.adds_lse, b_bias, zeros, use_acc=False, is_async=True)
    b_st = warpgroup_mma(hopper.opaque_tile(given.k), hopper.opaque_tile(stage.q).permute((1, 0)), b_st, is_async=True)
    b_dpt = warpgroup_mma(given.adds_delta, b_bias, zeros, use_acc=False, is_async=True)
    b_dpt = warpgroup_mma(
        hopper.opaque_tile(given.v), hopper.opaque_tile(stage.do).permute((1, 0)), b_dpt, is_async=True
    )
    return b_st, b_dpt


@gluon.jit
def listed(order, i, exists):
    """Return the i-th query tile of `order` (see `list_tiles`), 0 if it does not exist; i itself if `order` is None."""
    if order is None:
        return i
    else:
        return gl.load(order + i, mask=exists, other=0)


@gluon.jit
def dkdv_step(
    i, cursor, sums, stage: QueryStage, next_stage: QueryStage, heads: Heads, given: Keys, span: QuerySpan,
    masking: Masking,
):  # fmt: skip
    """Accumulate dK and dV over the i-th query tile, which is in `stage`; prefetch the next tile to `next_stage`.

    `cursor` is the tile's index in the order of visits, its head in the GQA group and, unless keys are listed, its
    index in the sequence. `sums` are dK, dV and, if keys are listed, the gradient of `keep`.

    Returns:
        the cursor of the next tile, and the sums.
    """
    i_q, i_h = cursor[0], cursor[1]
    # dense masks compute `more` here, listed keys later: its position affects how ptxas allocates registers
    if not masking.LISTED:
        more = i + 1 < span.count
    o_k = given.o_k
    BT: gl.constexpr = stage.q.shape[0]
    dtype: gl.constexpr = stage.q.dtype
    left_k: gl.constexpr = gl.DotOperandLayout(0, hopper.mma_layout(stage.q.shape[1], gl.num_warps()), 2)
    left_v: gl.constexpr = gl.DotOperandLayout(0, hopper.mma_layout(stage.do.shape[1], gl.num_warps()), 2)
    hopper.wait_async_copies(0)
    b_st, b_dpt = mma_scores_transposed(given, stage)
    i_next, i_h = advance(i_q, i_h, span.m_min, span.m_max)
    if masking.LISTED:
        more = i + 1 < span.count
    t_next = listed(span.order, i_next, more)
    # after the last tile there is nothing to prefetch, so copy 0 rows
    async_copy_queries(next_stage, heads, i_h, t_next * BT, gl.where(more, span.queries, 0))
    b_st = warpgroup_mma_wait(1, [b_st])
    b_pt = gl.exp2(b_st * (given.scale * LOG2_E))
    mask = span.mask
    if (i_q < span.full_min) | (i_q >= span.full_max):
        # queries beyond the last one need no mask, because their dO is 0
        if masking.LISTED:
            distance = plus_columns(i_q * BT + mask.shift - o_k, BT)
            b_pt = gl.where(within(distance, gl.maximum(mask.b_end - o_k, 0)[:, None]), b_pt, 0.0)
        else:
            distance = plus_columns(cursor[2] * BT + mask.keys - span.queries - o_k, BT)
            m_s = visible(
                distance, o_k[:, None], mask.keys, mask.window, mask.sinks, masking.CAUSAL, masking.WINDOW
            )  # fmt: skip
            b_pt = gl.where(m_s, b_pt, 0.0)
    b_left = gl.convert_layout(b_pt.to(dtype), left_v)
    b_dv = warpgroup_mma(b_left, hopper.opaque_tile(stage.do), sums[1], is_async=True)
    b_dpt = warpgroup_mma_wait(1, [b_dpt])
    b_dst = b_pt * b_dpt
    if masking.LISTED:
        b_dm = sums[2]
        if mask.b_away is not None:
            o_q = i_q * BT + mask.shift + gl.arange(0, BT, gl.SliceLayout(0, hopper.mma_layout(BT, gl.num_warps())))
            b_dm += gl.sum(gl.where(o_q[None, :] >= mask.b_away[:, None], b_dst, 0.0), 1)
    b_right = gl.convert_layout(b_dst.to(dtype), left_k)
    b_dk = warpgroup_mma(b_right, hopper.opaque_tile(stage.q), sums[0], is_async=True)
    # listing b_left and b_right in deps keeps their registers live until the WGMMAs have read them
    b_dk, b_dv, b_left, b_right = warpgroup_mma_wait(0, [b_dk, b_dv, b_left, b_right])
    if masking.LISTED:
        return (i_next, i_h), (b_dk, b_dv, b_dm)
    else:
        return (i_next, i_h, t_next), (b_dk, b_dv)
