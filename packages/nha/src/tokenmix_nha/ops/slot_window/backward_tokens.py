"""Gradients of a chunk's values and keys, each through the slots and through the window.

Tiles are transposed, `[token, query]`. The window's loop shifts the queries from `shift_0` to `shift_1`: the queries at
`first − before + shift` precede the chunk's own query rows `o_q`, and their windows contain tokens of the chunk.
"""

from collections import namedtuple

import triton
import triton.language as tl

from tokenmix_core.chunking import cdiv
from tokenmix_core.kernels import LOG2_E, cached_launch
from tokenmix_nha.ops.slot_window import tile as tiles
from tokenmix_nha.ops.slot_window import tuning
from tokenmix_nha.ops.slot_window.head_loops import each_head_of_keys
from tokenmix_nha.ops.slot_window.tile import SIZES
from tokenmix_nha.ops.slot_window.types import Backward, Gates, SlotGradients, Softmax

_Values = namedtuple("_Values", "q k f weight column ds_v lse do p dv scale")
_Keys = namedtuple("_Keys", "q k v f q_slots weight column ds_k lse delta do dz dk dk_slots scale")


@triton.jit
def _values(chunk, t, at, c):
    """Store dv for a chunk of one head."""
    first, keys, oldest, length, count, entry, begin_k, begin_q = chunk
    HQ = at.H * c.GROUP
    o_r, o_n = tl.arange(0, c.BT), tl.arange(0, c.BN)
    o_j, m_j, m_s, m_e, o_q, m_q = tiles.token_rows(first, keys, oldest, length, at.before, at.window, c.BT)
    # if no token of the chunk enters the slots, read no slots
    slots = tl.where(first < keys - at.window, c.M, 0)
    scale_2 = t.scale * LOG2_E
    m_w = (o_r[:, None] > o_r[None, :]) & (o_r[:, None] <= o_r[None, :] + at.window) & m_j[:, None]
    shift_0 = tl.maximum(at.before - first, 0) // c.BN * c.BN
    shift_1 = tl.minimum(at.window, keys - first)
    p_f, p_weight, p_col = t.f + begin_k * c.SLOTS, t.weight + entry * c.BT * c.M, t.column + entry * c.BT * c.M
    p_dsv = t.ds_v + entry * c.V * c.M

    b_dv = tl.zeros([c.BT, c.V], dtype=tl.float32)
    for i_m in tl.range(0, slots, c.BM, num_stages=1):
        b_dv = tiles.add_end_gradients(b_dv, p_weight + i_m, p_dsv + i_m, c.BM, c.M, c.V, c.BT, c.DOT)
    b_k = tiles.load_rows(t.k + begin_k * c.K, o_j, m_j, at.H * c.K, c.K)
    for i_g in range(c.GROUP):
        p_q, p_do, p_row = t.q + (begin_q + i_g) * c.K, t.do + (begin_q + i_g) * c.V, begin_q + i_g
        b_q = tiles.load_rows(p_q, o_q, m_q, HQ * c.K, c.K)
        b_lse = tl.load(t.lse + p_row + o_q.to(tl.int64) * HQ, mask=m_q, other=float("inf"))
        b_b = tl.dot(b_k, tl.trans(b_q), input_precision=c.DOT) * scale_2 - b_lse[None, :]
        b_b = tl.exp2(tl.where(m_w, b_b, float("-inf")))
        for i_m in tl.range(0, slots, c.BM, num_stages=1):
            b_y = tiles.load_by_slot(t.p + p_row * c.M + i_m, o_q, m_q, HQ, c.M, c.BM)
            b_b += tiles.pair_weights(b_y, p_col + i_m, p_f + i_m, count, o_j, m_e, at.H * c.SLOTS, c.SLOTS - i_m, c)
        b_do = tiles.load_rows(p_do, o_q, m_q, HQ * c.V, c.V)
        b_dv = tl.dot(b_b.to(b_k.dtype), b_do, b_dv, input_precision=c.DOT)
        for shift in range(shift_0, shift_1, c.BN):
            o_qn = first - at.before + shift + o_n
            m_qn = (o_qn >= 0) & (o_qn < length) & (shift + o_n < at.window)
            b_qn = tiles.load_rows(p_q, o_qn, m_qn, HQ * c.K, c.K)
            b_don = tiles.load_rows(p_do, o_qn, m_qn, HQ * c.V, c.V)
            b_lsen = tl.load(t.lse + p_row + o_qn.to(tl.int64) * HQ, mask=m_qn, other=float("inf"))
            m_wn = (o_r[:, None] <= shift + o_n[None, :]) & m_j[:, None]
            b_s = tl.dot(b_k, tl.trans(b_qn), input_precision=c.DOT) * scale_2 - b_lsen[None, :]
            b_s = tl.exp2(tl.where(m_wn, b_s, float("-inf")))
            b_dv = tl.dot(b_s.to(b_k.dtype), b_don, b_dv, input_precision=c.DOT)
    tiles.store_rows(t.dv + begin_k * c.V, b_dv, o_j, m_s, at.H * c.V, c.V)


@cached_launch
@triton.jit(do_not_specialize=SIZES)
def slot_window_backward_values_kernel(
    q, k, f, splits, weight, column, ds_v, start, cu_seqlens, lse, do, p, dv, scale, T, N, H, before, window, chunks,
    entries, M: tl.constexpr, SLOTS, BM: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr,
    BN: tl.constexpr, STRONG: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, FACTOR: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    """Store dv `[BT, V]` for a key chunk and HEADS heads.

    With STRONG, compute only strong chunks (in which a slot decays by more than 80 bits), else only the others.
    """
    each_head_of_keys(
        _values,
        _Values(q, k, f, weight, column, ds_v, lse, do, p, dv, scale),
        tiles.Chunks(splits, start, cu_seqlens, T, N, H, before, window, chunks, entries),
        tiles.Constants(M, SLOTS, BM, K, V, BT, GROUP, HEADS, STRONG, FACTOR, DOT, BN),
    )  # fmt: skip


@triton.jit
def _keys(chunk, t, at, c):
    """Store dk, and dk_slots if OWN_SLOT_KEYS, for a chunk of one head."""
    first, keys, oldest, length, count, entry, begin_k, begin_q = chunk
    HQ = at.H * c.GROUP
    o_r, o_n = tl.arange(0, c.BT), tl.arange(0, c.BN)
    o_j, m_j, m_s, m_e, o_q, m_q = tiles.token_rows(first, keys, oldest, length, at.before, at.window, c.BT)
    # if no token of the chunk enters the slots, read no slots
    slots = tl.where(first < keys - at.window, c.M, 0)
    scale_2 = t.scale * LOG2_E
    m_w = (o_r[:, None] > o_r[None, :]) & (o_r[:, None] <= o_r[None, :] + at.window) & m_j[:, None]
    shift_0 = tl.maximum(at.before - first, 0) // c.BN * c.BN
    shift_1 = tl.minimum(at.window, keys - first)
    p_f, p_weight, p_col = t.f + begin_k * c.SLOTS, t.weight + entry * c.BT * c.M, t.column + entry * c.BT * c.M
    p_dsk = t.ds_k + entry * c.K * c.M

    b_dk = tl.zeros([c.BT, c.K], dtype=tl.float32)
    for i_m in tl.range(0, slots, c.BM, num_stages=1):
        b_dk = tiles.add_end_gradients(b_dk, p_weight + i_m, p_dsk + i_m, c.BM, c.M, c.K, c.BT, c.DOT)
    b_k = tiles.load_rows(t.k + begin_k * c.K, o_j, m_j, at.H * c.K, c.K)
    b_v = tiles.load_rows(t.v + begin_k * c.V, o_j, m_j, at.H * c.V, c.V)
    for i_g in range(c.GROUP):
        p_row = begin_q + i_g
        b_b = tl.zeros([c.BT, c.BT], dtype=tl.float32)
        if c.OWN_SLOT_KEYS:
            b_q = tiles.load_rows(t.q_slots + p_row * c.K, o_q, m_q, HQ * c.K, c.K)
        else:
            b_q = tiles.load_rows(t.q + p_row * c.K, o_q, m_q, HQ * c.K, c.K)
            b_lse = tl.load(t.lse + p_row + o_q.to(tl.int64) * HQ, mask=m_q, other=float("inf"))
            b_delta = tl.load(t.delta + p_row + o_q.to(tl.int64) * HQ, mask=m_q, other=0.0)
            b_do = tiles.load_rows(t.do + p_row * c.V, o_q, m_q, HQ * c.V, c.V)
            b_s = tl.dot(b_k, tl.trans(b_q), input_precision=c.DOT) * scale_2 - b_lse[None, :]
            b_b += tl.exp2(tl.where(m_w, b_s, float("-inf")))
            b_b *= (tl.dot(b_v, tl.trans(b_do), input_precision=c.DOT) - b_delta[None, :]) * t.scale
        for i_m in tl.range(0, slots, c.BM, num_stages=1):
            b_y = tiles.load_by_slot(t.dz + p_row * c.M + i_m, o_q, m_q, HQ, c.M, c.BM)
            b_b += tiles.pair_weights(b_y, p_col + i_m, p_f + i_m, count, o_j, m_e, at.H * c.SLOTS, c.SLOTS - i_m, c)
        b_dk = tl.dot(b_b.to(b_k.dtype), b_q, b_dk, input_precision=c.DOT)
    if c.OWN_SLOT_KEYS:
        tiles.store_rows(t.dk_slots + begin_k * c.K, b_dk, o_j, m_s, at.H * c.K, c.K)
        b_dk = tl.zeros([c.BT, c.K], dtype=tl.float32)
        # slots and window have separate queries here, so the window's loop must also cover the chunk's own query rows
        shift_1 = tl.minimum(at.window + c.BT, keys - first)
    for i_g in range(c.GROUP):
        p_q, p_do, p_row = t.q + (begin_q + i_g) * c.K, t.do + (begin_q + i_g) * c.V, begin_q + i_g
        for shift in range(shift_0, shift_1, c.BN):
            o_qn = first - at.before + shift + o_n
            m_qn = (o_qn >= 0) & (o_qn < length)
            if not c.OWN_SLOT_KEYS:
                m_qn &= shift + o_n < at.window
            b_qn = tiles.load_rows(p_q, o_qn, m_qn, HQ * c.K, c.K)
            b_don = tiles.load_rows(p_do, o_qn, m_qn, HQ * c.V, c.V)
            b_lsen = tl.load(t.lse + p_row + o_qn.to(tl.int64) * HQ, mask=m_qn, other=float("inf"))
            b_deltan = tl.load(t.delta + p_row + o_qn.to(tl.int64) * HQ, mask=m_qn, other=0.0)
            o_s = (shift + o_n)[None, :] - o_r[:, None]
            m_wn = (o_s >= 0) & (o_s < at.window) & m_j[:, None]
            b_s = tl.dot(b_k, tl.trans(b_qn), input_precision=c.DOT) * scale_2 - b_lsen[None, :]
            b_s = tl.exp2(tl.where(m_wn, b_s, float("-inf")))
            b_s *= (tl.dot(b_v, tl.trans(b_don), input_precision=c.DOT) - b_deltan[None, :]) * t.scale
            b_dk = tl.dot(b_s.to(b_k.dtype), b_qn, b_dk, input_precision=c.DOT)
    tiles.store_rows(t.dk + begin_k * c.K, b_dk, o_j, m_s, at.H * c.K, c.K)


@cached_launch
@triton.jit(do_not_specialize=SIZES)
def slot_window_backward_keys_kernel(
    q, k, v, f, q_slots, splits, weight, column, ds_k, start, cu_seqlens, lse, delta, do, dz, dk, dk_slots, scale, T, N,
    H, before, window, chunks, entries, M: tl.constexpr, SLOTS, BM: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, STRONG: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr,
    OWN_SLOT_KEYS: tl.constexpr, FACTOR: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Store dk, and dk_slots if OWN_SLOT_KEYS, `[BT, K]` for a key chunk and HEADS heads.

    With STRONG, compute only strong chunks (in which a slot decays by more than 80 bits), else only the others.
    """
    each_head_of_keys(
        _keys,
        _Keys(q, k, v, f, q_slots, weight, column, ds_k, lse, delta, do, dz, dk, dk_slots, scale),
        tiles.Chunks(splits, start, cu_seqlens, T, N, H, before, window, chunks, entries),
        tiles.Constants(M, SLOTS, BM, K, V, BT, GROUP, HEADS, STRONG, FACTOR, DOT, BN, OWN_SLOT_KEYS),
    )  # fmt: skip


def token_gradients(
    launch, b: Backward, gates: Gates, softmax: Softmax, slots: SlotGradients, *, strong: bool
) -> None:  # fmt: skip
    """Fill dv, dk and dk_slots for strong chunks (a slot decays by over 80 bits) if `strong`, else for weak ones."""
    x, y = b.x, b.y
    tile = tuning.tile(y.M, y.window, x.q.dtype)
    each = tuning.strong_heads(y.key_chunks * y.rows, y.H) if strong else 1
    grid = y.key_chunks * y.rows, cdiv(y.H, each)
    shared = dict(
        q=x.q, k=x.k, f=x.f, splits=b.saved.splits, weight=gates.weight, column=gates.column, start=x.start,
        cu_seqlens=x.cu_seqlens, lse=b.saved.lse, do=b.do, scale=x.scale, **y.of_keys, **y.portable, BM=tile.BM,
        BN=tile.BN, STRONG=strong, HEADS=each, num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    launch(slot_window_backward_values_kernel, grid, ds_v=slots.ds_v, p=softmax.p, dv=b.grads.dv, **shared)
    launch(
        slot_window_backward_keys_kernel, grid, v=x.v, q_slots=x.q_slots, ds_k=slots.ds_k, delta=softmax.delta,
        dz=softmax.dz, dk=b.grads.dk, dk_slots=b.grads.dk_slots, OWN_SLOT_KEYS=x.k_slots is not None, **shared,
    )  # fmt: skip
