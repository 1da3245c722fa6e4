"""Triton backward kernels: gradients of a block of keys, and partial gradients of the queries that list this block.

Scores are computed again, once for all three gradients. Each split of a block's list stores partial sums of dk and dv,
and each pair of a query and a block a partial dq; two further kernels add these up in a fixed order.
"""

from __future__ import annotations

import math
from collections import namedtuple
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmix_core.kernels import LOG2_E, cached_launch
from tokenmix_core.ops import add_dot, dense_rows, load_tile, store_tile, strides
from tokenmix_core.ops import block_size as width
from tokenmix_lte.ops.selected_blocks import forward
from tokenmix_lte.ops.selected_blocks.lists import Lists, block_of, boundaries, locate_split
from tokenmix_lte.ops.selected_blocks.plan import query_runs

_Tensors = namedtuple("_Tensors", "p_q p_do p_lse p_delta part_q s_qt s_qh s_dt s_dh s_lh")


@cached_launch
@triton.jit
def _compute_delta(
    o, do, dlse, delta, s_db, s_dt, s_dh, T, HQ, tiles, V: tl.constexpr, BM: tl.constexpr, BV: tl.constexpr
):  # fmt: skip
    """Compute delta = rowsum(o ∘ do) − dlse for a tile of queries of one head."""
    i_bh = (tl.program_id(0) // tiles).to(tl.int64)
    i_b = i_bh // HQ
    i_h = i_bh % HQ
    first = tl.program_id(0) % tiles * BM
    b_o = load_tile(o + (i_b * T * HQ + i_h) * V, first, T, HQ * V, V, BM, BV, True)
    b_do = load_tile(do + i_b * s_db + i_h * s_dh, first, T, s_dt, V, BM, BV, True)
    o_t = first + tl.arange(0, BM)
    b_delta = tl.sum(b_o.to(tl.float32) * b_do.to(tl.float32), 1)
    if dlse is not None:
        b_delta -= tl.load(dlse + i_bh * T + o_t, mask=o_t < T, other=0.0)
    tl.store(delta + i_bh * T + o_t, b_delta, mask=o_t < T)


@triton.jit
def row_gradients(b_dk, b_dv, t, block, split, i, S, scale, c, MASKED: tl.constexpr):
    """Add a tile of rows to dk and dv of the block, and store the partial dq of each row from this block.

    MASKED: whether rows may lie before some of the block's keys, or may not exist.
    """
    b_pair, b_t, b_g, m_r = forward.load_rows(split, i, S, c.G, c.BM, MASKED)
    b_q = forward.load_heads(t.p_q, b_t, b_g, t.s_qt, t.s_qh, c.K, c.BK)
    b_do = forward.load_heads(t.p_do, b_t, b_g, t.s_dt, t.s_dh, c.V, c.BV)
    o_l = b_g.to(tl.int64) * t.s_lh + b_t
    b_lse = tl.load(t.p_lse + o_l) * LOG2_E
    b_delta = tl.load(t.p_delta + o_l)
    # rows of a score tile are keys: no MMA then needs the transposed result of another MMA as operand
    b_pt = tl.exp2(tl.dot(block.k, tl.trans(b_q), input_precision=c.PRECISION) * scale - b_lse[None, :])
    if MASKED:
        o_k = tl.arange(0, block.k.shape[0])
        b_pt = tl.where((o_k[:, None] <= (b_t - block.row)[None, :]) & m_r[None, :], b_pt, 0.0)
    b_dv = add_dot(b_pt.to(b_do.dtype), b_do, b_dv, c.PRECISION)
    b_dpt = tl.dot(block.v, tl.trans(b_do), input_precision=c.PRECISION)
    b_dst = (b_pt * (b_dpt - b_delta[None, :])).to(b_q.dtype)
    b_dk = add_dot(b_dst, b_q, b_dk, c.PRECISION)
    b_dqt = tl.dot(tl.trans(block.k), b_dst, input_precision=c.PRECISION)
    o_d = tl.arange(0, c.BK)
    p_dq = t.part_q + (b_pair.to(tl.int64) * c.G + b_g)[None, :] * c.K + o_d[:, None]
    if MASKED:
        tl.store(p_dq, b_dqt.to(t.part_q.dtype.element_ty), mask=m_r[None, :] & (o_d < c.K)[:, None])
    elif c.K == c.BK:
        tl.store(p_dq, b_dqt.to(t.part_q.dtype.element_ty))
    else:
        tl.store(p_dq, b_dqt.to(t.part_q.dtype.element_ty), mask=(o_d < c.K)[:, None])
    return b_dk, b_dv


@cached_launch
@triton.jit
def _partial_backward(
    q, k, v, do, lse, delta, part_q, part_k, part_v, listed, ends, masked, owners, cu_seqlens,
    s_qb, s_qt, s_qh, s_kb, s_kt, s_kh, s_vb, s_vt, s_vh, s_db, s_dt, s_dh, s_lb, s_lh,
    T, TQ, TK, first, B, H, S, U, N, scale,
    G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BM: tl.constexpr, BLOCK: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, P: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute a split's partial dk and dv, and the partial dq of its pairs (diagram in `forward._partial_forward`)."""
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
    block, split = forward.Block(b_k, b_v, row), forward.Split(p_list, low, high)
    t = _Tensors(
        q + i_b * s_qb + i_h * G * s_qh, do + i_b * s_db + i_h * G * s_dh, lse + i_b * s_lb + i_h * G * s_lh,
        delta + i_b * s_lb + i_h * G * s_lh, part_q + (i_b * H + i_h) * T * S * G * K, s_qt, s_qh, s_dt, s_dh, s_lh,
    )  # fmt: skip
    b_dk = tl.zeros([BLOCK, BK], tl.float32)
    b_dv = tl.zeros([BLOCK, BV], tl.float32)
    clear = tl.cdiv(tl.minimum(tl.maximum(inside - low, 0), high - low) * G, BM)
    full = tl.maximum((high - low) * G // BM, clear)
    for i in range(clear, full):
        b_dk, b_dv = row_gradients(
            b_dk, b_dv, t, block, split, i, S, scale, forward.Constants(G, K, V, BM, BK, BV, PRECISION), False
        )
    for i in range(0, clear + tl.cdiv((high - low) * G, BM) - full):
        i_tile = tl.where(i < clear, i, full + i - clear)
        b_dk, b_dv = row_gradients(
            b_dk, b_dv, t, block, split, i_tile, S, scale, forward.Constants(G, K, V, BM, BK, BV, PRECISION), True
        )
    store_tile(part_k + tl.cast(i_x, tl.int64) * BLOCK * BK, b_dk, 0, BLOCK, BK, BK, BLOCK, BK)
    store_tile(part_v + tl.cast(i_x, tl.int64) * BLOCK * BV, b_dv, 0, BLOCK, BV, BV, BLOCK, BV)


@cached_launch
@triton.jit
def _combine_key_grads(
    part_k, part_v, dk, dv, ends, cu_seqlens, TK, H, U, N, scale,
    K: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, P: tl.constexpr,
    PACKED: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Sum the partial dk and dv of a block's splits; with `ADD`, add the sums of earlier slices of queries."""
    i_r = tl.program_id(0)
    i_b = (i_r // U // H).to(tl.int64)
    i_h = i_r // U % H
    start, keys, key, _ = block_of(i_r % U, TK, TK, 0, N, cu_seqlens, BLOCK, PACKED)
    begin, end = boundaries(ends, i_r)
    i_first = begin // P + i_r
    b_dk = tl.zeros([BLOCK, BK], tl.float32)
    b_dv = tl.zeros([BLOCK, BV], tl.float32)
    for i in range(i_first, i_first + tl.cdiv(end - begin, P)):
        b_dk += load_tile(part_k, i * BLOCK, 0, BK, BK, BLOCK, BK, False)
        b_dv += load_tile(part_v, i * BLOCK, 0, BV, BV, BLOCK, BV, False)
    b_dk *= scale
    # an unused block between two packed sequences has no keys
    keys = tl.where(key < keys, keys, 0)
    p_dk = dk + ((i_b * TK + start) * H + i_h) * K
    p_dv = dv + ((i_b * TK + start) * H + i_h) * V
    if ADD:
        b_dk += load_tile(p_dk, key, keys, H * K, K, BLOCK, BK, True)
        b_dv += load_tile(p_dv, key, keys, H * V, V, BLOCK, BV, True)
    store_tile(p_dk, b_dk, key, keys, H * K, K, BLOCK, BK)
    store_tile(p_dv, b_dv, key, keys, H * V, V, BLOCK, BV)


@cached_launch
@triton.jit
def _combine_query_grads(
    part_q, slots, dq, s_b, s_t, T, H, S, tiles, scale, G: tl.constexpr, K: tl.constexpr, BM: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    """Sum, for each row of a tile, the partial dq of its blocks."""
    i_bh = (tl.program_id(0) // tiles).to(tl.int64)
    o_r = tl.program_id(0) % tiles * BM + tl.arange(0, BM)
    m_r = o_r < T * G
    o_t = o_r // G
    o_d = tl.arange(0, BK)
    p_slot = slots + (i_bh * T + o_t) * S
    o_row = (i_bh * T + o_t) * S * G + o_r % G
    b_dq = tl.zeros([BM, BK], tl.float32)
    for s in tl.range(0, S, loop_unroll_factor=4):
        m_s = tl.load(p_slot + s, mask=m_r, other=-1) >= 0
        p_dq = part_q + (o_row + s * G)[:, None] * K + o_d[None, :]
        b_dq += tl.load(p_dq, mask=m_s[:, None] & (o_d < K)[None, :], other=0.0).to(tl.float32)
    p_dq = dq + i_bh // H * s_b + o_t.to(tl.int64) * s_t + (i_bh % H * G + o_r % G) * K
    b_dq = (b_dq * scale).to(dq.dtype.element_ty)
    tl.store(p_dq[:, None] + o_d[None, :], b_dq, mask=m_r[:, None] & (o_d < K)[None, :])


def block_attention_backward(
    q, k, v, blocks, o, lse, do, dlse, cu_seqlens, *, block_size, scale, saved_lists: Sequence[Lists] = ()
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk and dv; if the forward pass has saved no lists, make them."""
    q, k, v, do = (dense_rows(x) for x in (q, k, v, do))
    (B, TQ, HQ, K), (TK, H, V), S = q.shape, v.shape[1:], blocks.shape[3]
    G, delta, dq = HQ // H, torch.empty_like(lse), q.new_empty(q.shape)
    tiles = triton.cdiv(TQ, 64)
    _compute_delta[(B * HQ * tiles,)](
        o=o, do=do, dlse=None if dlse is None else dlse.contiguous(), delta=delta, **strides(d=do), T=TQ, HQ=HQ,
        tiles=tiles, V=V, BM=64, BV=width(V),
    )  # fmt: skip
    runs = list(query_runs(q, V, S))
    # with several slices of queries, accumulate in float32 and round once at the end
    dk, dv = (x.new_empty(x.shape, dtype=x.dtype if len(runs) == 1 else torch.float32) for x in (k, v))
    for i, run in enumerate(runs):
        b_q, b_do, b_dq, b_lse, b_delta = q[:, run], do[:, run], dq[:, run], lse[:, :, run], delta[:, :, run]
        lists = saved_lists[i] if saved_lists else forward.lists_of(q, k, blocks, run, cu_seqlens, block_size)
        shape = forward.sizes(q, k, blocks, run, cu_seqlens, block_size)
        options = forward.constants("backward", q, v, block_size, cu_seqlens)
        part_q = q.new_empty(lists.listed.numel() * G * K)
        part_k, part_v = (lse.new_empty(len(lists.owners), block_size, size) for size in (options["BK"], options["BV"]))
        _partial_backward[(len(lists.owners),)](
            q=b_q, k=k, v=v, do=b_do, lse=b_lse, delta=b_delta, part_q=part_q, part_k=part_k, part_v=part_v,
            listed=lists.listed, ends=lists.ends, masked=lists.masked, owners=lists.owners, cu_seqlens=cu_seqlens,
            **strides(q=b_q, k=k, v=v, d=b_do), s_lb=lse.stride(0), s_lh=lse.stride(1), **shape,
            scale=scale * math.log2(math.e), **options,
        )  # fmt: skip
        _combine_key_grads[(B * H * shape["U"],)](
            part_k=part_k, part_v=part_v, dk=dk, dv=dv, ends=lists.ends, cu_seqlens=cu_seqlens, TK=TK, H=H,
            U=shape["U"], N=shape["N"], scale=scale,
            **{name: options[name] for name in ("K", "V", "BLOCK", "BK", "BV", "P", "PACKED")}, ADD=i > 0,
            num_warps=8,
        )  # fmt: skip
        T, BM = shape["T"], 32
        tiles = triton.cdiv(T * G, BM)
        _combine_query_grads[(B * H * tiles,)](
            part_q=part_q, slots=lists.slots, dq=b_dq, s_b=dq.stride(0), s_t=dq.stride(1), T=T, H=H, S=S, tiles=tiles,
            scale=scale, G=G, K=K, BM=BM, BK=width(K), num_warps=4,
        )  # fmt: skip
    return dq, dk.to(k.dtype), dv.to(v.dtype)
