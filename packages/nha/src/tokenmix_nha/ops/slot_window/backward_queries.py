"""Gradients of a chunk's queries, and the fields of `Softmax` for the gradients of keys, values and gates."""

import triton
import triton.language as tl

from tokenmix_core.chunking import cdiv
from tokenmix_core.kernels import LOG2_E, cached_launch
from tokenmix_nha.ops.slot_window import tuning
from tokenmix_nha.ops.slot_window.head_padding import each_head_of_queries
from tokenmix_nha.ops.slot_window.tile import (
    SIZES,
    as_factor,
    block_pairs,
    block_to_boundary,
    block_to_start,
    load_columns,
    load_factors,
    load_gates,
    load_pairs,
    load_rows,
    log2_gates,
    opposite_pairs,
    store_by_slot,
    store_rows,
)
from tokenmix_nha.ops.slot_window.types import Backward, Gates, Softmax


@triton.jit
def _slot_logits(
    b_q, b_do, b_a, b_dp, p_k, p_v, p_row, p_col, p_f, exists, count, o_j, m_e, stride, slots, BM: tl.constexpr,
    M: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, STRONG: tl.constexpr, FACTOR: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    """Return for BM slots logits z and dp, both without row factors; then row factors, column factors, log2 gates."""
    b_z = tl.dot(b_q, load_columns(p_k, M, K, BM), input_precision=DOT)
    b_d = tl.dot(b_do, load_columns(p_v, M, V, BM), input_precision=DOT)
    b_col, b_log = load_factors(p_col, exists, 0.0, M, BT, BM), 0.0
    size = BT >> count
    o_r = tl.arange(0, BT)
    r_t, r_j = o_r[:, None], o_r[None, :]
    if STRONG:
        b_log = log2_gates(load_gates(p_f, o_j, m_e, stride, slots, BM), DOT)
        b_start = block_to_start(b_log, size, BT, DOT)
        b_z *= b_start
        b_d *= b_start
        for i in range(count):
            half = (BT // 2) >> i
            b_boundary = block_to_boundary(b_log, size, half, BT, DOT)
            m_h = opposite_pairs(r_t, r_j, half)
            b_h = as_factor(b_col * b_boundary, FACTOR, DOT)
            b_z += b_boundary * tl.dot(as_factor(tl.where(m_h, b_a, 0.0), FACTOR, DOT), b_h, input_precision=DOT)
            b_d += b_boundary * tl.dot(as_factor(tl.where(m_h, b_dp, 0.0), FACTOR, DOT), b_h, input_precision=DOT)
    m_b = block_pairs(r_t, r_j, size)
    b_z = tl.dot(as_factor(tl.where(m_b, b_a, 0.0), FACTOR, DOT), b_col, b_z, input_precision=DOT)
    b_d = tl.dot(as_factor(tl.where(m_b, b_dp, 0.0), FACTOR, DOT), b_col, b_d, input_precision=DOT)
    return b_z, b_d, load_factors(p_row, exists, 1.0, M, BT, BM), b_col, b_log


@triton.jit
def _window(
    b_q, b_do, b_lse, p_k, p_v, shift, first, oldest, keys, window, H, scale_2, K: tl.constexpr, V: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Return BN keys of the window, their probabilities, and do · v."""
    o_n, r_t = tl.arange(0, BN), tl.arange(0, BT)[:, None]
    o_jn = first + shift + o_n
    m_jn = (o_jn >= oldest) & (o_jn < keys)
    b_kn = load_rows(p_k, o_jn, m_jn, H * K, K)
    b_vn = load_rows(p_v, o_jn, m_jn, H * V, V)
    m_wn = ((shift + o_n)[None, :] > r_t) & ((shift + o_n)[None, :] <= r_t + window) & m_jn[None, :]
    b_s = tl.dot(b_q, tl.trans(b_kn), input_precision=DOT) * scale_2 - b_lse[:, None]
    b_s = tl.exp2(tl.where(m_wn, b_s, float("-inf")))
    return b_kn, b_s, tl.dot(b_do, tl.trans(b_vn), input_precision=DOT)


@triton.jit
def _queries(
    chunk, q, k, v, f, q_slots, k_slots, row, column, states_k, states_v, o, lse, do, dq, dq_slots, p, dz, x, delta,
    scale, H, before, window, M: tl.constexpr, SLOTS,
    BM: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr, STRONG: tl.constexpr,
    GROUP: tl.constexpr, OWN_SLOT_KEYS: tl.constexpr, FACTOR: tl.constexpr, DOT: tl.constexpr, SHORT: tl.constexpr,
):  # fmt: skip
    """Compute dq (and dq_slots) of a chunk of one query head."""
    i_t, count, entry, oldest, begin_q, begin_k, length, keys = chunk
    HQ = H * GROUP
    o_r = tl.arange(0, BT)
    first = i_t * BT
    o_q = first + window - before + o_r
    m_q = (o_q >= 0) & (o_q < length)
    o_j = first + o_r
    m_j = (o_j >= oldest) & (o_j < keys)

    b_do = load_rows(do + begin_q * V, o_q, m_q, HQ * V, V)
    p_row = begin_q + o_q.to(tl.int64) * HQ
    # lse = ∞ gives rows without a query probability 0
    b_lse = tl.load(lse + p_row, mask=m_q, other=float("inf"))

    b_q, b_qs, b_ks = load_pairs(q, k, q_slots, k_slots, begin_q, begin_k, o_q, m_q, o_j, m_j, H, HQ, K, OWN_SLOT_KEYS)
    b_a = tl.dot(b_qs, tl.trans(b_ks), input_precision=DOT)
    b_dp = tl.dot(b_do, tl.trans(load_rows(v + begin_k * V, o_j, m_j, H * V, V)), input_precision=DOT)
    r_t, r_j = o_r[:, None], o_r[None, :]
    size = BT >> count
    m_b = block_pairs(r_t, r_j, size)
    m_e = (o_j >= 0) & (o_j < keys - window)
    scale_2 = scale * LOG2_E
    b_w = tl.zeros([BT, BT], dtype=tl.float32)
    shift_0 = 0
    if not OWN_SLOT_KEYS:
        # if slots and window use the same keys, the chunk's q kᵀ serves both
        shift_0 = BT
        m_w = (r_j > r_t) & (r_j <= r_t + window) & m_j[None, :]
        b_w += tl.exp2(tl.where(m_w, b_a * scale_2 - b_lse[:, None], float("-inf")))
    o_m = tl.arange(0, BM)[None, :]
    shift_0 += tl.maximum(oldest - first - shift_0, 0) // BN * BN
    shift_1 = tl.minimum(BT + window, keys - first)
    p_rows, p_col = row + entry * BT * M, column + entry * BT * M
    p_f, p_sk, p_sv = f + begin_k * SLOTS, states_k + entry * K * M, states_v + entry * V * M
    if SHORT:
        # sum δ from the probabilities: with nearly equal slots, dz cancels only if δ has the same rounding as p and dp
        b_delta = tl.sum(b_w * b_dp, 1)
        for shift in range(shift_0, shift_1, BN):
            _, b_s, b_ds = _window(
                b_q, b_do, b_lse, k + begin_k * K, v + begin_k * V, shift, first, oldest, keys, window, H, scale_2, K,
                V, BT, BN, DOT,
            )  # fmt: skip
            b_delta += tl.sum(b_s * b_ds, 1)
        if M > BM:
            for i_m in tl.range(0, M, BM, num_stages=1):
                b_z, b_d, b_row, b_col, b_log = _slot_logits(
                    b_qs, b_do, b_a, b_dp, p_sk + i_m, p_sv + i_m, p_rows + i_m, p_col + i_m, p_f + i_m,
                    i_t >= 0, count, o_j, m_e, H * SLOTS, SLOTS - i_m, BM, M, K, V, BT, STRONG, FACTOR, DOT,
                )  # fmt: skip
                b_p = tl.exp2(tl.where(i_m + o_m < SLOTS, b_z * b_row * scale_2, float("-inf")) - b_lse[:, None])
                b_delta += tl.sum(b_p * b_d * b_row, 1)
    else:
        b_o = load_rows(o + begin_q * V, o_q, m_q, HQ * V, V)
        b_delta = tl.sum(b_do.to(tl.float32) * b_o.to(tl.float32), 1)
    if M <= BM:
        b_z, b_d, b_row, b_col, b_log = _slot_logits(
            b_qs, b_do, b_a, b_dp, p_sk, p_sv, p_rows, p_col, p_f, i_t >= 0, count, o_j, m_e, H * SLOTS, SLOTS,
            BM, M, K, V, BT, STRONG, FACTOR, DOT,
        )  # fmt: skip
        b_p = tl.exp2(tl.where(o_m < SLOTS, b_z * b_row * scale_2, float("-inf")) - b_lse[:, None])
        if SHORT:
            b_delta += tl.sum(b_p * b_d * b_row, 1)
    tl.store(delta + p_row, b_delta, mask=m_q)

    b_w = tl.zeros([BT, BT], dtype=tl.float32)
    b_dq = tl.zeros([BT, K], dtype=tl.float32)
    for i_m in tl.range(0, M, BM, num_stages=1):
        if M > BM:
            b_z, b_d, b_row, b_col, b_log = _slot_logits(
                b_qs, b_do, b_a, b_dp, p_sk + i_m, p_sv + i_m, p_rows + i_m, p_col + i_m, p_f + i_m,
                i_t >= 0, count, o_j, m_e, H * SLOTS, SLOTS - i_m, BM, M, K, V, BT, STRONG, FACTOR, DOT,
            )  # fmt: skip
            b_p = tl.exp2(tl.where(i_m + o_m < SLOTS, b_z * b_row * scale_2, float("-inf")) - b_lse[:, None])
        b_y = as_factor(b_p * b_row, FACTOR, DOT)
        store_by_slot(p + begin_q * M + i_m, b_y, o_q, m_q, HQ, M, BM)
        # x multiplies the same rounded factors as the keys' gradients, so that their rounding errors cancel in df
        b_x = b_y.to(tl.float32) * b_d
        b_y = as_factor(b_p * (b_d * b_row - b_delta[:, None]) * (scale * b_row), FACTOR, DOT)
        store_by_slot(dz + begin_q * M + i_m, b_y, o_q, m_q, HQ, M, BM)
        store_by_slot(x + begin_q * M + i_m, b_x + b_y.to(tl.float32) * b_z, o_q, m_q, HQ, M, BM)
        b_w += tl.where(m_b, tl.dot(b_y, tl.trans(b_col), input_precision=DOT), 0.0)
        b_ys = b_y.to(b_q.dtype)
        if STRONG:
            b_ys = (b_y * block_to_start(b_log, size, BT, DOT)).to(b_q.dtype)
            for i in range(count):
                half = (BT // 2) >> i
                b_boundary = block_to_boundary(b_log, size, half, BT, DOT)
                b_h = tl.trans(as_factor(b_col * b_boundary, FACTOR, DOT))
                b_h = tl.dot(as_factor(b_y * b_boundary, FACTOR, DOT), b_h, input_precision=DOT)
                b_w += tl.where(opposite_pairs(r_t, r_j, half), b_h, 0.0)
        b_dq = tl.dot(b_ys, tl.trans(load_columns(p_sk + i_m, M, K, BM)), b_dq, input_precision=DOT)
    if not OWN_SLOT_KEYS:
        # recomputed, to save registers
        b_ks = load_rows(k + begin_k * K, o_j, m_j, H * K, K)
        b_a = tl.dot(b_q, tl.trans(b_ks), input_precision=DOT) * scale_2 - b_lse[:, None]
        b_a = tl.exp2(tl.where(m_w, b_a, float("-inf")))
        b_dp = tl.dot(b_do, tl.trans(load_rows(v + begin_k * V, o_j, m_j, H * V, V)), input_precision=DOT)
        b_w += b_a * (b_dp - b_delta[:, None]) * scale
    b_dq = tl.dot(b_w.to(b_q.dtype), b_ks, b_dq, input_precision=DOT)
    if OWN_SLOT_KEYS:
        store_rows(dq_slots + begin_q * K, b_dq, o_q, m_q, HQ * K, K)
        b_dq = tl.zeros([BT, K], dtype=tl.float32)
    for shift in range(shift_0, shift_1, BN):
        b_kn, b_s, b_ds = _window(
            b_q, b_do, b_lse, k + begin_k * K, v + begin_k * V, shift, first, oldest, keys, window, H, scale_2, K, V,
            BT, BN, DOT,
        )  # fmt: skip
        b_s *= (b_ds - b_delta[:, None]) * scale
        b_dq = tl.dot(b_s.to(b_q.dtype), b_kn, b_dq, input_precision=DOT)
    store_rows(dq + begin_q * K, b_dq, o_q, m_q, HQ * K, K)


@cached_launch
@triton.jit(do_not_specialize=SIZES)
def slot_window_backward_queries_kernel(
    q, k, v, f, q_slots, k_slots, splits, row, column, states_k, states_v, start, cu_seqlens, o, lse, do, dq, dq_slots,
    p, dz, x, delta, scale, T, N, H, before, window, chunks, entries, extra, lead, M: tl.constexpr, SLOTS,
    BM: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr, STRONG: tl.constexpr,
    HEADS: tl.constexpr, GROUP: tl.constexpr, OWN_SLOT_KEYS: tl.constexpr, HAS_START: tl.constexpr,
    PACKED: tl.constexpr, FACTOR: tl.constexpr, DOT: tl.constexpr, SHORT: tl.constexpr,
):  # fmt: skip
    """Store dq (and dq_slots) of a query chunk for HEADS query heads, and per slot the probability p, the scaled logit
    gradient dz and x = ⟨dS, S⟩."""
    each_head_of_queries(
        _queries,
        (
            q, k, v, f, q_slots, k_slots, row, column, states_k, states_v, o, lse, do, dq, dq_slots, p, dz, x, delta,
            scale, H, before, window, M, SLOTS, BM, K, V, BT, BN, STRONG, GROUP, OWN_SLOT_KEYS, FACTOR, DOT, SHORT,
        ),
        splits, start, cu_seqlens, T, N, H, before, window, chunks, entries, extra, lead, BT, STRONG, HEADS, GROUP,
        HAS_START, PACKED,
    )  # fmt: skip


def query_gradients(launch, b: Backward, gates: Gates, softmax: Softmax, *, strong: bool) -> None:
    """Fill dq, dq_slots and `softmax` of weak or `strong` chunks."""
    x, y, saved = b.x, b.y, b.saved
    tile = tuning.tile(y.M, y.window, x.q.dtype)
    chunks, heads = y.query_chunks * y.rows, y.H * y.GROUP
    each = tuning.strong_heads(chunks, heads) if strong else 1
    launch(
        slot_window_backward_queries_kernel, (chunks, cdiv(heads, each)),
        q=x.q, k=x.k, v=x.v, f=x.f, q_slots=x.q_slots, k_slots=x.k_slots, splits=saved.splits, row=gates.row,
        column=gates.column, states_k=saved.states_k, states_v=saved.states_v, start=x.start, cu_seqlens=x.cu_seqlens,
        o=b.o, lse=saved.lse, do=b.do, dq=b.grads.dq, dq_slots=b.grads.dq_slots, **softmax._asdict(), scale=x.scale,
        **y.of_queries, **y.portable, BM=tile.BM, BN=tile.BN, STRONG=strong, HEADS=each,
        OWN_SLOT_KEYS=x.k_slots is not None, SHORT=y.window <= tuning.SHORT_WINDOW, num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )  # fmt: skip
