"""Triton forward kernels: partial attention of the queries that list a block of keys, then the sum for each query.

A program holds the keys and values of a block, and loops over a split (a part) of the block's list. A row of a tile is
one query and one of the query heads that share the keys, so any number of heads fills a tile. The partial outputs of a
query for its blocks are combined by their log-sum-exps, as in split-KV decoding.
"""

from __future__ import annotations

import math
from collections import namedtuple

import triton
import triton.language as tl
from torch import Tensor

from tokenmix_core.kernels import LOG2_E, cached_launch
from tokenmix_core.ops import block_size as width
from tokenmix_core.ops import dense_rows, load_tile, precision, strides
from tokenmix_lte.ops.selected_blocks.lists import Lists, block_of, locate_split, make_lists
from tokenmix_lte.ops.selected_blocks.plan import pairs_per_split, query_runs, tile

# compile-time sizes, and the precision of MMAs
Constants = namedtuple("Constants", "G K V BM BK BV PRECISION")
# keys and values of a block; `row`: the query at the block's first key, counted among the queries of this launch
Block = namedtuple("Block", "k v row")
# the pairs `low` … `high − 1` in the list of a block
Split = namedtuple("Split", "listed low high")
# pointers to q and the partial results for one batch row and key head, and strides of q
_Tensors = namedtuple("_Tensors", "p_q part_o part_lse s_qt s_qh")


@triton.jit
def load_rows(split, i, S, G: tl.constexpr, BM: tl.constexpr, CHECK: tl.constexpr):
    """Return the pairs, queries, heads and mask of valid rows of the i-th tile of a split.

    With `CHECK`, invalid rows repeat the last pair.
    """
    o_r = i * BM + tl.arange(0, BM)
    o_p = split.low + o_r // G
    m_r = o_p < split.high
    if CHECK:
        o_p = tl.minimum(o_p, split.high - 1)
    b_pair = tl.load(split.listed + o_p)
    return b_pair, b_pair // S, o_r % G, m_r


@triton.jit
def load_heads(p_x, o_t, o_g, s_t, s_h, D: tl.constexpr, BD: tl.constexpr):
    """Load a tile `[BM, BD]` each of whose rows is one query and head; columns from D on are 0."""
    o_d = tl.arange(0, BD)
    p_x += (o_t.to(tl.int64) * s_t + o_g * s_h)[:, None] + o_d[None, :]
    if D == BD:
        return tl.load(p_x)
    else:
        return tl.load(p_x, mask=(o_d < D)[None, :], other=0.0)


@triton.jit
def attend_rows(t, block, split, i, S, scale, c, MASKED: tl.constexpr):
    """Compute a tile of rows' attention to this block only; store the output and the scores' base-2 log-sum-exp.

    MASKED: whether rows may lie before some of the block's keys, or may not exist.
    """
    b_pair, b_t, b_g, m_r = load_rows(split, i, S, c.G, c.BM, MASKED)
    b_q = load_heads(t.p_q, b_t, b_g, t.s_qt, t.s_qh, c.K, c.BK)
    b_s = tl.dot(b_q, tl.trans(block.k), input_precision=c.PRECISION) * scale
    if MASKED:
        o_k = tl.arange(0, block.k.shape[0])
        b_s = tl.where(o_k[None, :] <= (b_t - block.row)[:, None], b_s, float("-inf"))
    b_top = tl.max(b_s, 1)
    b_p = tl.exp2(b_s - b_top[:, None])
    b_sum = tl.sum(b_p, 1)
    b_o = tl.dot(b_p.to(block.v.dtype), block.v, input_precision=c.PRECISION) / b_sum[:, None]
    o_row = b_pair.to(tl.int64) * c.G + b_g
    o_v = tl.arange(0, c.BV)
    p_o = t.part_o + o_row[:, None] * c.V + o_v[None, :]
    b_lse = b_top + tl.log2(b_sum)
    if MASKED:
        tl.store(p_o, b_o.to(t.part_o.dtype.element_ty), mask=m_r[:, None] & (o_v < c.V)[None, :])
        tl.store(t.part_lse + o_row, b_lse, mask=m_r)
    elif c.V == c.BV:
        tl.store(p_o, b_o.to(t.part_o.dtype.element_ty))
        tl.store(t.part_lse + o_row, b_lse)
    else:
        tl.store(p_o, b_o.to(t.part_o.dtype.element_ty), mask=(o_v < c.V)[None, :])
        tl.store(t.part_lse + o_row, b_lse)


@cached_launch
@triton.jit
def _partial_forward(
    q, k, v, part_o, part_lse, listed, ends, masked, owners, cu_seqlens,
    s_qb, s_qt, s_qh, s_kb, s_kt, s_kh, s_vb, s_vt, s_vh, T, TQ, TK, first, B, H, S, U, N, scale,
    G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BM: tl.constexpr, BLOCK: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, P: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the partial outputs of one split: of the pairs `low` … `high − 1` in the list of one block of keys.

    listed:  | list of block 0 | list of block 1         | …      split 0 of block 1 = its first P pairs
                               | split 0 | split 1 | …            rows of a split = pairs × G heads, BM at a time
    k, v:                       one block, in registers           q: gathered by row
    row tiles: 0 … clear − 1 need the causal mask, clear … full − 1 do not, the last one may be incomplete
    """
    i_x = tl.program_id(0)
    blocks = B * H * U
    if i_x >= tl.load(ends + blocks - 1) // P + blocks:
        return
    i_b, i_h, i_u, i_r, p_list, low, high = locate_split(owners, ends, listed, i_x, H, U, P)
    if low >= high:
        return
    start, keys, key, row = block_of(i_u, TK, TQ, first, N, cu_seqlens, BLOCK, PACKED)
    inside = tl.load(masked + i_r)
    b_k = load_tile(k + i_b * s_kb + start * s_kt + i_h * s_kh, key, keys, s_kt, K, BLOCK, BK, True)
    b_v = load_tile(v + i_b * s_vb + start * s_vt + i_h * s_vh, key, keys, s_vt, V, BLOCK, BV, True)
    block, split = Block(b_k, b_v, row), Split(p_list, low, high)
    t = _Tensors(
        q + i_b * s_qb + i_h * G * s_qh, part_o + (i_b * H + i_h) * T * S * G * V,
        part_lse + (i_b * H + i_h) * T * S * G, s_qt, s_qh,
    )  # fmt: skip
    # row tiles `clear` … `full − 1` have only valid rows that see the whole block
    clear = tl.cdiv(tl.minimum(tl.maximum(inside - low, 0), high - low) * G, BM)
    full = tl.maximum((high - low) * G // BM, clear)
    for i in range(clear, full):
        attend_rows(t, block, split, i, S, scale, Constants(G, K, V, BM, BK, BV, PRECISION), False)
    for i in range(0, clear + tl.cdiv((high - low) * G, BM) - full):
        i_tile = tl.where(i < clear, i, full + i - clear)
        attend_rows(t, block, split, i_tile, S, scale, Constants(G, K, V, BM, BK, BV, PRECISION), True)


@cached_launch
@triton.jit
def _combine_outputs(
    part_o, part_lse, slots, o, lse, s_ob, s_ot, s_lb, s_lh, T, H, S, tiles,
    G: tl.constexpr, V: tl.constexpr, BM: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Combine, for each row of a tile, the partial outputs of its blocks; without any, o = 0 and lse = −∞."""
    i_bh = (tl.program_id(0) // tiles).to(tl.int64)
    i_b = i_bh // H
    i_h = i_bh % H
    o_r = tl.program_id(0) % tiles * BM + tl.arange(0, BM)
    m_r = o_r < T * G
    o_t = o_r // G
    o_v = tl.arange(0, BV)
    p_slot = slots + (i_bh * T + o_t) * S
    o_row = (i_bh * T + o_t) * S * G + o_r % G
    b_top = tl.full([BM], float("-inf"), tl.float32)
    for s in range(0, S):
        m_s = tl.load(p_slot + s, mask=m_r, other=-1) >= 0
        b_top = tl.maximum(b_top, tl.load(part_lse + o_row + s * G, mask=m_s, other=float("-inf")))
    b_max = tl.where(b_top == float("-inf"), 0.0, b_top)
    b_sum = tl.zeros([BM], tl.float32)
    b_o = tl.zeros([BM, BV], tl.float32)
    for s in tl.range(0, S, loop_unroll_factor=4):
        m_s = tl.load(p_slot + s, mask=m_r, other=-1) >= 0
        b_weight = tl.exp2(tl.load(part_lse + o_row + s * G, mask=m_s, other=float("-inf")) - b_max)
        p_o = part_o + (o_row + s * G)[:, None] * V + o_v[None, :]
        b_part = tl.load(p_o, mask=m_s[:, None] & (o_v < V)[None, :], other=0.0)
        b_o += b_weight[:, None] * b_part.to(tl.float32)
        b_sum += b_weight
    m_sum = b_sum > 0
    b_sum = tl.where(m_sum, b_sum, 1.0)
    b_lse = tl.where(m_sum, (b_max + tl.log2(b_sum)) / LOG2_E, float("-inf"))
    i_hq = i_h * G + o_r % G
    p_o = o + i_b * s_ob + o_t.to(tl.int64) * s_ot + i_hq * V
    tl.store(p_o[:, None] + o_v[None, :], (b_o / b_sum[:, None]).to(o.dtype.element_ty), m_r[:, None] & (o_v < V))
    tl.store(lse + i_b * s_lb + i_hq * s_lh + o_t, b_lse, mask=m_r)


def block_attention_forward(q, k, v, blocks, o, lse, cu_seqlens, *, block_size, scale) -> list[Lists]:
    """Write o `[B, TQ, HQ, V]` and the log-sum-exp `[B, HQ, TQ]`; return the lists for each slice of queries."""
    q, k, v = (dense_rows(x) for x in (q, k, v))
    G, V, S = q.shape[2] // k.shape[2], v.shape[3], blocks.shape[3]
    all_lists = []
    for run in query_runs(q, V, S):
        b_q, b_o, b_lse = q[:, run], o[:, run], lse[:, :, run]
        lists = lists_of(q, k, blocks, run, cu_seqlens, block_size)
        part_o, part_lse = (x.new_empty(lists.listed.numel() * G * size) for x, size in ((o, V), (lse, 1)))
        _partial_forward[(len(lists.owners),)](
            q=b_q, k=k, v=v, part_o=part_o, part_lse=part_lse, listed=lists.listed, ends=lists.ends,
            masked=lists.masked, owners=lists.owners, cu_seqlens=cu_seqlens, **strides(q=b_q, k=k, v=v),
            **sizes(q, k, blocks, run, cu_seqlens, block_size), scale=scale * math.log2(math.e),
            **constants("forward", q, v, block_size, cu_seqlens),
        )  # fmt: skip
        combine_outputs(part_o, part_lse, lists, b_o, b_lse, S=S, G=G)
        all_lists.append(lists)
    return all_lists


def combine_outputs(part_o, part_lse, lists: Lists, o: Tensor, lse: Tensor, *, S: int, G: int) -> None:
    """Combine the partial outputs, and write o `[B, T, HQ, V]` and the log-sum-exp `[B, HQ, T]`, which may be views."""
    (B, T, HQ, V), BM = o.shape, 32
    tiles = triton.cdiv(T * G, BM)
    _combine_outputs[(B * HQ // G * tiles,)](
        part_o=part_o, part_lse=part_lse, slots=lists.slots, o=o, lse=lse, s_ob=o.stride(0), s_ot=o.stride(1),
        s_lb=lse.stride(0), s_lh=lse.stride(1), T=T, H=HQ // G, S=S, tiles=tiles, G=G, V=V, BM=BM, BV=width(V),
        num_warps=4,
    )  # fmt: skip


def lists_of(q, k, blocks, run: slice, cu_seqlens, block_size: int) -> Lists:
    """Invert `blocks` for the queries in the slice `run`: list for each block the queries that selected it."""
    H = k.shape[2]
    return make_lists(
        blocks[:, run], cu_seqlens, first=run.start, TQ=q.shape[1], TK=k.shape[1],
        U=block_slots(k.shape[1], block_size, cu_seqlens), block_size=block_size,
        split=pairs_per_split(q.shape[2] // H),
    )  # fmt: skip


def block_slots(tokens: int, block_size: int, cu_seqlens: Tensor | None) -> int:
    """Return the number of key blocks in a batch row, including unused ones between packed sequences."""
    return triton.cdiv(tokens, block_size) if cu_seqlens is None else tokens // block_size + len(cu_seqlens) - 1


def sizes(q, k, blocks, run: slice, cu_seqlens, block_size: int) -> dict[str, int]:
    """Return the sizes that all kernels take, for the queries in the slice `run` of a call."""
    (B, TQ), (TK, H), N = q.shape[:2], k.shape[1:3], 0 if cu_seqlens is None else len(cu_seqlens) - 1
    U = block_slots(TK, block_size, cu_seqlens)
    return {
        **{"T": run.stop - run.start, "TQ": TQ, "TK": TK, "first": run.start},
        **{"B": B, "H": H, "S": blocks.shape[3], "U": U, "N": N},
    }


def constants(step: str, q, v, block_size: int, cu_seqlens) -> dict:
    """Return the compile-time constants of the kernels of a call."""
    K, V, G = q.shape[3], v.shape[3], q.shape[2] // v.shape[2]
    BM, warps, stages = tile(step, max(K, V), q.dtype)
    return {
        **{"G": G, "K": K, "V": V, "BM": BM, "BLOCK": block_size},
        **{"BK": width(K), "BV": width(V), "P": pairs_per_split(G), "PACKED": cu_seqlens is not None},
        **{"PRECISION": precision(q.dtype), "num_warps": warps, "num_stages": stages},
    }
