"""The kernel that chooses blocks: probabilities summed over a group's heads, and the greatest of them, tile by tile."""

from __future__ import annotations

import math

import triton
import triton.language as tl

from tokenmix_core.chunking import next_power_of_2
from tokenmix_core.launch.kernels import cached_launch
from tokenmix_core.ops.softmax_attention.forward import block_size as width
from tokenmix_core.ops.softmax_attention.forward import dense_rows, precision, strides
from tokenmix_core.ops.softmax_attention.tiles import load_tile
from tokenmix_core.tile.decay import LOG2_E
from tokenmix_lte.ops.selected_blocks.lists import sequence_of

# what no block has; its bits turn the order of blocks round
_NONE = tl.constexpr(0x7FFFFFFF)


@triton.jit
def ranks_of(b_p, o_c):
    """Probabilities, none negative, and blocks in one number that sorts by the first, of equal ones the lower last."""
    return (b_p.to(tl.int32, bitcast=True).to(tl.int64) << 32) | (o_c ^ _NONE).to(tl.int64)


@cached_launch
@triton.jit
def _select_blocks(
    q, pooled, lse, blocks, cu_seqlens, s_qb, s_qt, s_qh, s_kb, s_kt, s_kh, s_lb, s_lt, s_lh, TQ, U, H, N, tiles,
    shift, count, scale,
    G: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, BQ: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr,
    S: tl.constexpr, BLOCK: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The blocks of BQ queries for a head of keys a program, whose rows are queries and heads, GROUP of them each."""
    i_b = (tl.program_id(0) // tiles // H).to(tl.int64)
    i_h = (tl.program_id(0) // tiles % H).to(tl.int64)
    # the last queries, which have most to choose from, start first
    first = (tiles - 1 - tl.program_id(0) % tiles) * BQ
    o_r = tl.arange(0, BQ * GROUP)
    o_t = first + o_r // GROUP
    o_g = o_r % GROUP
    m_r = (o_t < TQ) & (o_g < G)
    o_d = tl.arange(0, BK)
    p_q = q + i_b * s_qb + i_h * G * s_qh + o_t.to(tl.int64) * s_qt + o_g * s_qh
    b_q = tl.load(p_q[:, None] + o_d[None, :], mask=m_r[:, None] & (o_d < K)[None, :], other=0.0)
    p_lse = lse + i_b * s_lb + o_t.to(tl.int64) * s_lt + (i_h * G + o_g) * s_lh
    # rows that do not exist weigh nothing
    b_lse = tl.load(p_lse, mask=m_r, other=float("inf")) * LOG2_E
    o_q = tl.minimum(first + tl.arange(0, BQ), TQ - 1)
    if PACKED:
        b_n = sequence_of(o_q, N, cu_seqlens)
        b_begin = tl.load(cu_seqlens + b_n).to(tl.int32)
        b_own = (o_q - b_begin) // BLOCK
        b_slot = b_begin // BLOCK + b_n
    else:
        b_own = (o_q + shift) // BLOCK
        b_slot = tl.zeros_like(b_own)
    low = tl.min(b_slot, 0)
    high = tl.minimum(tl.max(b_slot + b_own, 0) + 1, U)
    b_best = tl.full([BQ, S], -1, tl.int64)
    for i in range(low, high, BC):
        b_k = load_tile(pooled + i_b * s_kb + i_h * s_kh, i, U, s_kt, K, BC, BK, True)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * scale
        o_c = (i + tl.arange(0, BC))[None, :] - b_slot[:, None]
        m_c = (o_c >= 0) & (o_c < b_own[:, None])
        # of blocks that a query does not see the exponent may be anything
        m_s = tl.reshape(tl.broadcast_to(m_c[:, None, :], [BQ, GROUP, BC]), [BQ * GROUP, BC])
        b_p = tl.where(m_s, tl.exp2(b_s - b_lse[:, None]), 0.0)
        b_p = tl.sum(tl.reshape(b_p, [BQ, GROUP, BC]), 1)
        m_forced = (o_c == 0) | (o_c == b_own[:, None]) | (o_c == b_own[:, None] - 1)
        b_p = tl.where(m_forced, float("inf"), b_p)
        b_rank = tl.where((o_c >= 0) & (o_c <= b_own[:, None]), ranks_of(b_p, o_c), -1)
        b_rank = tl.reshape(tl.join(b_best, tl.topk(b_rank, S)), [BQ, 2 * S])
        b_best = tl.topk(b_rank, S)
    # the greatest come first; what is beyond `count` was there to fill a power of two
    o_s = tl.arange(0, S)
    m_s = (b_best >= 0) & (o_s < count)[None, :]
    b_c = tl.sort(tl.where(m_s, (b_best & _NONE).to(tl.int32) ^ _NONE, _NONE))
    b_c = tl.where(b_c == _NONE, -1, b_c)
    o_q = first + tl.arange(0, BQ)
    p_c = blocks + ((i_b * TQ + o_q) * H + i_h) * count
    tl.store(p_c[:, None] + o_s[None, :], b_c, mask=(o_q < TQ)[:, None] & (o_s < count)[None, :])


def select_blocks_kernel(q, pooled, lse, blocks, cu_seqlens, *, block_size, shift, scale) -> None:
    """Write the blocks `[B, TQ, H, count]`."""
    q, pooled = dense_rows(q), dense_rows(pooled)
    (B, TQ, HQ, K), (U, H), count = q.shape, pooled.shape[1:3], blocks.shape[3]
    G, S = HQ // H, next_power_of_2(count)
    group = next_power_of_2(G)
    BQ = max(1, 64 // group)
    tiles = triton.cdiv(TQ, BQ)
    _select_blocks[(tiles * H * B,)](
        q=q, pooled=pooled, lse=lse, blocks=blocks, cu_seqlens=cu_seqlens, **strides(q=q, k=pooled, l=lse), TQ=TQ, U=U,
        H=H, N=0 if cu_seqlens is None else len(cu_seqlens) - 1, tiles=tiles, shift=shift, count=count,
        scale=scale * math.log2(math.e), G=G, GROUP=group, K=K, BQ=BQ, BC=max(64, S), BK=width(K), S=S,
        BLOCK=block_size, PACKED=cu_seqlens is not None, PRECISION=precision(q.dtype), num_warps=4, num_stages=2,
    )  # fmt: skip
