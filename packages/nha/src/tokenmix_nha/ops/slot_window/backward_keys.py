"""Gradients of a chunk's keys, through the slots and through the window.

Tiles are transposed, `[token, query]`.
"""

import triton
import triton.language as tl

from tokenmix_core.chunking import cdiv
from tokenmix_core.kernels import LOG2_E, cached_launch
from tokenmix_nha.ops.slot_window import tuning
from tokenmix_nha.ops.slot_window.head_padding import each_head_of_keys
from tokenmix_nha.ops.slot_window.tile import (
    SIZES,
    add_end_gradients,
    load_by_slot,
    load_rows,
    pair_weights,
    store_rows,
    token_rows,
)
from tokenmix_nha.ops.slot_window.types import Backward, Gates, SlotGradients, Softmax


@triton.jit
def _keys(
    chunk, q, k, v, f, q_slots, weight, column, ds_k, lse, delta, do, dz, dk, dk_slots, scale, H, before, window,
    M: tl.constexpr, SLOTS, BM: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr,
    STRONG: tl.constexpr, GROUP: tl.constexpr, OWN_SLOT_KEYS: tl.constexpr, FACTOR: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Compute dk (and dk_slots) of a chunk of one head."""
    first, keys, oldest, length, count, entry, begin_k, begin_q = chunk
    HQ = H * GROUP
    o_r, o_n = tl.arange(0, BT), tl.arange(0, BN)
    o_j, m_j, m_s, m_e, o_q, m_q = token_rows(first, keys, oldest, length, before, window, BT)
    # 0 if no token of the chunk enters the slots
    slots = tl.where(first < keys - window, M, 0)
    scale_2 = scale * LOG2_E
    m_w = (o_r[:, None] > o_r[None, :]) & (o_r[:, None] <= o_r[None, :] + window) & m_j[:, None]
    # range of the queries whose windows hold the chunk's tokens, before the chunk's own query rows
    shift_0 = tl.maximum(before - first, 0) // BN * BN
    shift_1 = tl.minimum(window, keys - first)
    p_f, p_weight, p_col = f + begin_k * SLOTS, weight + entry * BT * M, column + entry * BT * M
    p_dsk = ds_k + entry * K * M

    b_dk = tl.zeros([BT, K], dtype=tl.float32)
    for i_m in tl.range(0, slots, BM, num_stages=1):
        b_dk = add_end_gradients(b_dk, p_weight + i_m, p_dsk + i_m, BM, M, K, BT, DOT)
    b_k = load_rows(k + begin_k * K, o_j, m_j, H * K, K)
    b_v = load_rows(v + begin_k * V, o_j, m_j, H * V, V)
    for i_g in range(GROUP):
        p_row = begin_q + i_g
        b_b = tl.zeros([BT, BT], dtype=tl.float32)
        if OWN_SLOT_KEYS:
            b_q = load_rows(q_slots + p_row * K, o_q, m_q, HQ * K, K)
        else:
            b_q = load_rows(q + p_row * K, o_q, m_q, HQ * K, K)
            b_lse = tl.load(lse + p_row + o_q.to(tl.int64) * HQ, mask=m_q, other=float("inf"))
            b_delta = tl.load(delta + p_row + o_q.to(tl.int64) * HQ, mask=m_q, other=0.0)
            b_do = load_rows(do + p_row * V, o_q, m_q, HQ * V, V)
            b_s = tl.dot(b_k, tl.trans(b_q), input_precision=DOT) * scale_2 - b_lse[None, :]
            b_b += tl.exp2(tl.where(m_w, b_s, float("-inf")))
            b_b *= (tl.dot(b_v, tl.trans(b_do), input_precision=DOT) - b_delta[None, :]) * scale
        for i_m in tl.range(0, slots, BM, num_stages=1):
            b_y = load_by_slot(dz + p_row * M + i_m, o_q, m_q, HQ, M, BM)
            b_b += pair_weights(
                b_y, p_col + i_m, p_f + i_m, count, o_j, m_e, H * SLOTS, SLOTS - i_m, BM, M, BT, FACTOR, DOT, STRONG
            )
        b_dk = tl.dot(b_b.to(b_k.dtype), b_q, b_dk, input_precision=DOT)
    if OWN_SLOT_KEYS:
        store_rows(dk_slots + begin_k * K, b_dk, o_j, m_s, H * K, K)
        b_dk = tl.zeros([BT, K], dtype=tl.float32)
        # the window has separate queries, so its loop also covers the chunk's own query rows
        shift_1 = tl.minimum(window + BT, keys - first)
    for i_g in range(GROUP):
        p_q, p_do, p_row = q + (begin_q + i_g) * K, do + (begin_q + i_g) * V, begin_q + i_g
        for shift in range(shift_0, shift_1, BN):
            o_qn = first - before + shift + o_n
            m_qn = (o_qn >= 0) & (o_qn < length)
            if not OWN_SLOT_KEYS:
                m_qn &= shift + o_n < window
            b_qn = load_rows(p_q, o_qn, m_qn, HQ * K, K)
            b_don = load_rows(p_do, o_qn, m_qn, HQ * V, V)
            b_lsen = tl.load(lse + p_row + o_qn.to(tl.int64) * HQ, mask=m_qn, other=float("inf"))
            b_deltan = tl.load(delta + p_row + o_qn.to(tl.int64) * HQ, mask=m_qn, other=0.0)
            o_s = (shift + o_n)[None, :] - o_r[:, None]
            m_wn = (o_s >= 0) & (o_s < window) & m_j[:, None]
            b_s = tl.dot(b_k, tl.trans(b_qn), input_precision=DOT) * scale_2 - b_lsen[None, :]
            b_s = tl.exp2(tl.where(m_wn, b_s, float("-inf")))
            b_s *= (tl.dot(b_v, tl.trans(b_don), input_precision=DOT) - b_deltan[None, :]) * scale
            b_dk = tl.dot(b_s.to(b_k.dtype), b_qn, b_dk, input_precision=DOT)
    store_rows(dk + begin_k * K, b_dk, o_j, m_s, H * K, K)


@cached_launch
@triton.jit(do_not_specialize=SIZES)
def slot_window_backward_keys_kernel(
    q, k, v, f, q_slots, splits, weight, column, ds_k, start, cu_seqlens, lse, delta, do, dz, dk, dk_slots, scale, T, N,
    H, before, window, chunks, entries, M: tl.constexpr, SLOTS, BM: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, STRONG: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr,
    OWN_SLOT_KEYS: tl.constexpr, HAS_START: tl.constexpr, PACKED: tl.constexpr, FACTOR: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Store dk (and dk_slots) `[BT, K]` of a key chunk, for HEADS heads."""
    each_head_of_keys(
        _keys,
        (
            q, k, v, f, q_slots, weight, column, ds_k, lse, delta, do, dz, dk, dk_slots, scale, H, before, window, M,
            SLOTS, BM, K, V, BT, BN, STRONG, GROUP, OWN_SLOT_KEYS, FACTOR, DOT,
        ),
        splits, start, cu_seqlens, T, N, H, before, window, chunks, entries, BT, STRONG, HEADS, GROUP, HAS_START,
        PACKED,
    )  # fmt: skip


def key_gradients(
    launch, b: Backward, gates: Gates, softmax: Softmax, slots: SlotGradients, *, strong: bool
) -> None:  # fmt: skip
    """Fill dk and dk_slots of weak or `strong` chunks."""
    x, y, saved = b.x, b.y, b.saved
    tile = tuning.tile(y.M, y.window, x.q.dtype)
    each = tuning.strong_heads(y.key_chunks * y.rows, y.H) if strong else 1
    launch(
        slot_window_backward_keys_kernel, (y.key_chunks * y.rows, cdiv(y.H, each)),
        q=x.q, k=x.k, v=x.v, f=x.f, q_slots=x.q_slots, splits=saved.splits, weight=gates.weight, column=gates.column,
        ds_k=slots.ds_k, start=x.start, cu_seqlens=x.cu_seqlens, lse=saved.lse, delta=softmax.delta, do=b.do,
        dz=softmax.dz, dk=b.grads.dk, dk_slots=b.grads.dk_slots, scale=x.scale, **y.of_keys, **y.portable, BM=tile.BM,
        BN=tile.BN, STRONG=strong, HEADS=each, OWN_SLOT_KEYS=x.k_slots is not None, num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )  # fmt: skip
