"""Tiles of the Hopper backward kernels: pipeline stages, resident operands, and the MMAs that both attentions share."""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, warpgroup_mma, warpgroup_mma_wait

from tokenmix_core.kernels.gluon.hopper import async_copy_tile, mma_layout, opaque, opaque_tile
from tokenmix_core.ops.softmax_attention.hopper.bias_columns import allocate_bias
from tokenmix_core.ops.softmax_attention.steps import Rows


class KeyStage(NamedTuple):
    """smem buffers of a KV tile."""

    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor


class QueryStage(NamedTuple):
    """smem buffers of a query tile."""

    q: gl.shared_memory_descriptor
    do: gl.shared_memory_descriptor
    bias: gl.shared_memory_descriptor


class Keys(NamedTuple):
    """Operands of the dK/dV kernel that stay: a KV tile and bias selectors in smem, positions and a score's factor."""

    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    adds_lse: gl.shared_memory_descriptor
    adds_delta: gl.shared_memory_descriptor
    o_k: gl.tensor
    scale: gl.tensor


class Queries(NamedTuple):
    """Operands of the dQ kernel that stay: a query tile in smem, lse and delta, positions and a score's factor."""

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


@gluon.jit
def allocate_keys(dtype: gl.constexpr, BT: gl.constexpr, K: gl.constexpr, V: gl.constexpr):
    """Allocate the stage of a KV tile."""
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    return KeyStage(
        gl.allocate_shared_memory(dtype, [BT, K], shared), gl.allocate_shared_memory(dtype, [BT, V], shared)
    )


@gluon.jit
def allocate_queries(dtype: gl.constexpr, BT: gl.constexpr, K: gl.constexpr, V: gl.constexpr):
    """Allocate the stage of a query tile."""
    q_s, do_s = allocate_keys(dtype, BT, K, V)
    return QueryStage(q_s, do_s, allocate_bias(BT))


@gluon.jit
def minus_columns(b_row, columns: gl.constexpr):
    """Return a value per row minus 0, 1, … by column, as constant offsets from the thread's first column."""
    o_c = gl.arange(0, columns, gl.SliceLayout(0, mma_layout(columns, gl.num_warps())))[None, :]
    return b_row[:, None] - o_c % 8 - o_c // 8 * 8


@gluon.jit
def plus_columns(b_row, columns: gl.constexpr):
    """Return a value per row plus 0, 1, … by column, as constant offsets from the thread's first column.

    The value is opaque: Triton's axis analysis takes a multiple of 16 minus the rows 0, 1, … for multiples of 16, and
    would then compare one column for several.
    """
    o_c = gl.arange(0, columns, gl.SliceLayout(0, mma_layout(columns, gl.num_warps())))
    return opaque(b_row)[:, None] + (o_c % 8)[None, :] + (o_c // 8 * 8)[None, :]


@gluon.jit
def async_copy_queries(stage: QueryStage, heads: Heads, i_h, first, queries):
    """Start async copies of a query tile, from row `first` on, of the `i_h`-th head of the GQA group; commit them."""
    i_h = i_h.to(gl.int64)
    q, do, bias = heads.q, heads.do, heads.bias
    s_q, s_do, s_bias = heads.strides
    async_copy_tile(stage.q, q.pointer + i_h * s_q, first, queries, q.stride, THREAD_RELATIVE=True)
    async_copy_tile(stage.do, do.pointer + i_h * s_do, first, queries, do.stride, THREAD_RELATIVE=True)
    async_copy_tile(stage.bias, bias.pointer + i_h * s_bias, first, queries, bias.stride, THREAD_RELATIVE=True)
    async_copy.commit_group()


@gluon.jit
def advance(i_q, i_h, m_min, m_max):
    """Return the query tile to visit after tile `i_q` of head `i_h`, and its head."""
    last = i_q + 1 == m_max
    return gl.where(last, m_min, i_q + 1), i_h + gl.where(last, 1, 0)


@gluon.jit
def mma_scores(given: Queries, k_s, v_s):
    """Start S = Q Kᵀ, then dP = dO Vᵀ."""
    BT: gl.constexpr = k_s.shape[0]
    zeros = gl.zeros([BT, BT], gl.float32, mma_layout(BT, gl.num_warps()))
    b_s = warpgroup_mma(opaque_tile(given.q), k_s.permute((1, 0)), zeros, use_acc=False, is_async=True)
    b_dp = warpgroup_mma(opaque_tile(given.do), v_s.permute((1, 0)), zeros, use_acc=False, is_async=True)
    return b_s, b_dp


@gluon.jit
def mma_dq(b_p, b_dp, given: Queries, k_s, b_dq):
    """Wait for dP and return dQ + dS K with dS = P ∘ (dP − delta)."""
    b_dp = warpgroup_mma_wait(0, [b_dp])
    b_ds = (b_p * (b_dp - given.b_delta[:, None])).to(k_s.dtype)
    sums: gl.constexpr = mma_layout(k_s.shape[1], gl.num_warps())
    b_ds = gl.convert_layout(b_ds, gl.DotOperandLayout(0, sums, 2))
    b_dq = warpgroup_mma(b_ds, k_s, b_dq, is_async=True)
    # listing b_ds in deps keeps its registers live until the WGMMA has read them
    b_dq, b_ds = warpgroup_mma_wait(0, [b_dq, b_ds])
    return b_dq


@gluon.jit
def mma_scores_transposed(given: Keys, stage: QueryStage):
    """Start K Qᵀ − lse / scale, then V dOᵀ − delta."""
    BN: gl.constexpr = given.k.shape[0]
    BM: gl.constexpr = stage.q.shape[0]
    zeros = gl.zeros([BN, BM], gl.float32, mma_layout(BM, gl.num_warps()))
    b_bias = stage.bias.permute((1, 0))
    b_st = warpgroup_mma(given.adds_lse, b_bias, zeros, use_acc=False, is_async=True)
    b_st = warpgroup_mma(opaque_tile(given.k), opaque_tile(stage.q).permute((1, 0)), b_st, is_async=True)
    b_dpt = warpgroup_mma(given.adds_delta, b_bias, zeros, use_acc=False, is_async=True)
    b_dpt = warpgroup_mma(opaque_tile(given.v), opaque_tile(stage.do).permute((1, 0)), b_dpt, is_async=True)
    return b_st, b_dpt
