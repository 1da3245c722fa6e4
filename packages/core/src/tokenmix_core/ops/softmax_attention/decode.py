"""Decoding by split KV: one kernel computes attention to shares of each sequence's cache, a second merges the results.

A program takes one share of the KV tiles, and a tile of the TQ · HQ / H query rows of one key head, which all use the
same loaded keys. Lengths stay on the device: no host synchronisation.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from tokenmix_core.chunking import cdiv, next_power_of_2
from tokenmix_core.kernels import tuning
from tokenmix_core.kernels.launch.launcher import cached_launch
from tokenmix_core.kernels.pdl import gdc_launch_and_wait
from tokenmix_core.kernels.triton.decay import LOG2_E
from tokenmix_core.kernels.triton.softmax import finish_softmax
from tokenmix_core.ops.softmax_attention.kv_tiles import key_tiles
from tokenmix_core.ops.softmax_attention.launch_args import block_size, dense_rows, precision, strides
from tokenmix_core.ops.softmax_attention.steps import Config, KeyRows, Rows, Visible, attention_step
from tokenmix_core.ops.softmax_attention.tuning import attention_decode as decode_tile


# do not specialise on `splits`, which depends on batch size and cache capacity: one compiled kernel serves any value
@cached_launch(loop_tiles=("BN",))
@triton.jit(do_not_specialize=["splits"])
def _attention_decode(
    q, k, v, o, lse, cache_seqlens,
    s_qb, s_qt, s_qh, s_kb, s_kt, s_kh, s_vb, s_vt, s_vh,
    TQ, HQ, H, splits, row_tiles, window, sinks, scale, page_table, columns, slots,
    K: tl.constexpr, V: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    WINDOW: tl.constexpr, PRECISION: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Compute attention of one tile of a key head's query rows to one share of the keys per program.

    With a page table `[B, H, columns]`, each key head has a length and a list of pages. BN divides PAGE, the number of
    tokens of a page. With `slots`, k and v are pools, and sequence b reads row `slots[b]` of them.
    """
    pid = tl.program_id(0)
    i_s = pid % splits
    i_m = pid // splits % row_tiles
    i_hk = (pid // splits // row_tiles % H).to(tl.int64)
    i_b = (pid // splits // row_tiles // H).to(tl.int64)
    i_kv = i_b if slots is None else tl.load(slots + i_b).to(tl.int64)
    # tile row r is query r // G of query head r % G of the key head's group
    G = HQ // H
    o_r = i_m * BM + tl.arange(0, BM)
    m_r = o_r < TQ * G
    o_t = o_r // G
    o_h = i_hk * G + o_r % G
    o_d = tl.arange(0, BK)
    p_q = q + i_b * s_qb + o_t * s_qt + o_h * s_qh
    b_q = tl.load(p_q[:, None] + o_d[None, :], mask=m_r[:, None] & (o_d < K)[None, :], other=0.0)

    keys = tl.load(cache_seqlens + (i_b if page_table is None else i_b * H + i_hk)).to(tl.int32)
    mask = Visible(keys - TQ + o_t, window, sinks)
    first = keys - TQ + i_m * BM // G
    last = keys - TQ + tl.minimum((i_m * BM + BM - 1) // G, TQ - 1)
    sink_tiles, n_min, _, _, n_max = key_tiles(first, last, keys, window, sinks, BN, True, WINDOW)
    tiles = sink_tiles + n_max - n_min
    share = tl.cdiv(tiles, splits)
    b_m = tl.full([BM], float("-inf"), tl.float32)
    b_l = tl.zeros([BM], tl.float32)
    b_o = tl.zeros([BM, BV], tl.float32)
    for i in range(i_s * share, tl.minimum((i_s + 1) * share, tiles)):
        i_k = tl.where(i < sink_tiles, i, n_min + i - sink_tiles)
        p_k, p_v = k + i_kv * s_kb + i_hk * s_kh, v + i_kv * s_vb + i_hk * s_vh
        if page_table is not None:
            # shift the pointers, so that the index of a token in the key head's list addresses it in this page
            column = i_k * BN // PAGE
            row = (tl.load(page_table + (i_b * H + i_hk) * columns + column) - column) * PAGE
            p_k, p_v = p_k + row.to(tl.int64) * s_kt, p_v + row.to(tl.int64) * s_vt
        kv = KeyRows(Rows(p_k, s_kt), Rows(p_v, s_vt), keys)
        b_o, b_m, b_l = attention_step(
            (b_o, b_m, b_l), b_q, kv, i_k * BN, mask, scale, Config(K, V, BK, BV, PRECISION, True, WINDOW), BN, True
        )

    b_norm, b_lse = finish_softmax(b_m, b_l, scale)
    o_row = ((i_b * TQ + o_t) * HQ + o_h) * splits + i_s
    o_d = tl.arange(0, BV)
    m_o = m_r[:, None] & (o_d < V)[None, :]
    tl.store(o + o_row[:, None] * V + o_d[None, :], (b_o * b_norm[:, None]).to(o.dtype.element_ty), mask=m_o)
    tl.store(lse + o_row, b_lse, mask=m_r)


@cached_launch
@triton.jit(do_not_specialize=["splits"])
def _merge_splits(
    o_parts, lse_parts, o, lse, splits, V: tl.constexpr, BS: tl.constexpr, BV: tl.constexpr, PDL: tl.constexpr = False
):  # fmt: skip
    """Merge a query head's outputs over all shares of its keys; one program per query and head."""
    gdc_launch_and_wait(PDL)
    i_row = tl.program_id(0).to(tl.int64)
    o_s = tl.arange(0, BS)
    o_d = tl.arange(0, BV)
    b_lse = tl.load(lse_parts + i_row * splits + o_s, mask=o_s < splits, other=float("-inf"))
    b_top = tl.max(b_lse, 0)
    b_w = tl.exp2((b_lse - tl.where(b_top == float("-inf"), 0.0, b_top)) * LOG2_E)
    b_norm, b_sum = finish_softmax(b_top, tl.sum(b_w, 0), LOG2_E)
    p_o = o_parts + (i_row * splits + o_s)[:, None] * V + o_d[None, :]
    b_o = tl.load(p_o, mask=(o_s < splits)[:, None] & (o_d < V)[None, :], other=0.0)
    b_o = tl.sum(b_o * b_w[:, None], 0) * b_norm
    tl.store(o + i_row * V + o_d, b_o.to(o.dtype.element_ty), mask=o_d < V)
    tl.store(lse + i_row, b_sum)


@cached_launch
@triton.jit(do_not_specialize=["rows"])
def _merge_two(
    o_a, lse_a, o_b, lse_b, o, lse, rows, V: tl.constexpr, BM: tl.constexpr, BV: tl.constexpr,
    PDL: tl.constexpr = False,
):  # fmt: skip
    """Merge outputs over two disjoint sets of keys; a program merges BM rows, one row per query and head."""
    gdc_launch_and_wait(PDL)
    o_r = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    o_d = tl.arange(0, BV)
    m_r = o_r < rows
    b_a = tl.load(lse_a + o_r, mask=m_r, other=float("-inf"))
    b_b = tl.load(lse_b + o_r, mask=m_r, other=float("-inf"))
    b_top = tl.maximum(b_a, b_b)
    b_zero = tl.where(b_top == float("-inf"), 0.0, b_top)
    b_a, b_b = tl.exp2((b_a - b_zero) * LOG2_E), tl.exp2((b_b - b_zero) * LOG2_E)
    b_norm, b_sum = finish_softmax(b_top * LOG2_E, b_a + b_b, 1.0)
    at = o_r[:, None] * V + o_d[None, :]
    mask = m_r[:, None] & (o_d < V)[None, :]
    b_o = tl.load(o_a + at, mask=mask, other=0.0).to(tl.float32) * (b_a * b_norm)[:, None]
    b_o += tl.load(o_b + at, mask=mask, other=0.0).to(tl.float32) * (b_b * b_norm)[:, None]
    tl.store(o + at, b_o.to(o.dtype.element_ty), mask=mask)
    tl.store(lse + o_r, b_sum, mask=m_r)


def merge_two(o_a, lse_a, o_b, lse_b):
    """Merge results over two disjoint sets of keys; return o `[B, T, HQ, V]` and the float32 lse `[B, T, HQ]`."""
    o_a, lse_a, o_b, lse_b = (x.contiguous() for x in (o_a, lse_a, o_b, lse_b))
    o, lse = torch.empty_like(o_a), torch.empty_like(lse_a)
    V = o.shape[-1]
    tile = tuning.row_tile(V)
    _merge_two[(cdiv(lse.numel(), tile.BM),)](
        o_a=o_a, lse_a=lse_a, o_b=o_b, lse_b=lse_b, o=o, lse=lse, rows=lse.numel(), V=V, BM=tile.BM, BV=tile.BD,
        num_warps=tile.num_warps,
    )  # fmt: skip
    return o, lse


def attention_decode(q, k_cache, v_cache, cache_seqlens, *, window, sinks, scale):
    """Return o `[B, TQ, HQ, V]` and the log-sum-exp `[B, TQ, HQ]` of attention to caches of consecutive tokens."""
    q, k_cache, v_cache = (dense_rows(x) for x in (q, k_cache, v_cache))
    return _decode(q, k_cache, v_cache, cache_seqlens, k_cache.shape[1], k_cache.shape[2], window, sinks, scale)


def paged_attention_decode(q, k_pages, v_pages, page_table, lengths, *, scale, slots):
    """Return o `[B, TQ, HQ, V]` and the log-sum-exp `[B, TQ, HQ]` of attention to the pages of each key head."""
    q = q.contiguous()
    # rows of a pool may be any distance apart
    k_pages, v_pages = (x if x[:1].is_contiguous() else x.contiguous() for x in (k_pages, v_pages))
    (_, H, columns), page = page_table.shape, k_pages.shape[2]
    # view all pages of a batch row as consecutive tokens that all heads share
    k, v = (x.flatten(1, 2).unsqueeze(2).expand(-1, -1, H, -1) for x in (k_pages, v_pages))
    return _decode(q, k, v, lengths, columns * page, H, None, 0, scale, page_table.contiguous(), page, slots)


def _decode(q, k, v, cache_seqlens, S, H, window, sinks, scale, page_table=None, page=None, slots=None):
    (B, TQ, HQ, K), V = q.shape, v.shape[3]
    rows = TQ * HQ // H
    BM = min(64, block_size(rows))
    row_tiles = cdiv(rows, BM)
    BN, warps, stages, maxnreg = decode_tile(max(K, V), q.dtype)
    if page is not None:
        BN = min(BN, page & -page)
    seen = S if window is None else min(S, window + TQ + sinks)
    splits = tuning.splits(B * H * row_tiles, cdiv(seen, BN), q.device)
    o, lse = q.new_empty(B, TQ, HQ, V), q.new_empty(B, TQ, HQ, dtype=torch.float32)
    o_parts, lse_parts = o, lse
    if splits > 1:
        o_parts = q.new_empty(B, TQ, HQ, splits, V, dtype=torch.float32)
        lse_parts = q.new_empty(B, TQ, HQ, splits, dtype=torch.float32)
    _attention_decode[(B * H * row_tiles * splits,)](
        q=q, k=k, v=v, o=o_parts, lse=lse_parts, cache_seqlens=cache_seqlens, **strides(q=q, k=k, v=v), TQ=TQ, HQ=HQ,
        H=H, splits=splits, row_tiles=row_tiles, window=window or 0, sinks=sinks, scale=scale * math.log2(math.e),
        page_table=page_table, columns=None if page_table is None else page_table.shape[2], slots=slots, K=K, V=V,
        BM=BM, BN=BN, BK=block_size(K), BV=block_size(V), WINDOW=window is not None, PRECISION=precision(q.dtype),
        PAGE=page, num_warps=warps, num_stages=stages, maxnreg=maxnreg,
    )  # fmt: skip
    if splits > 1:
        _merge_splits[(B * TQ * HQ,)](
            o_parts=o_parts, lse_parts=lse_parts, o=o, lse=lse, splits=splits, V=V, BS=max(32, next_power_of_2(splits)),
            BV=block_size(V), num_warps=4,
        )  # fmt: skip
    return o, lse
