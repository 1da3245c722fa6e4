"""Kernel of a chunk's query gradients; it also fills `Softmax`, which the gradients of keys, values and gates need."""

from collections import namedtuple

import triton
import triton.language as tl

from tokenmix_core.chunking import cdiv
from tokenmix_core.kernels import LOG2_E, cached_launch
from tokenmix_nha.ops.slot_window import tile as tiles
from tokenmix_nha.ops.slot_window import tuning
from tokenmix_nha.ops.slot_window.head_loops import each_head_of_queries
from tokenmix_nha.ops.slot_window.tile import SIZES
from tokenmix_nha.ops.slot_window.types import Backward, Gates, Softmax

_Tensors = namedtuple(
    "_Tensors",
    "q k v f q_slots k_slots row column states_k states_v o lse do dq dq_slots p dz x delta scale ring_k stride_ring_k "
    "ring_k_slots stride_ring_k_slots",
    # gradients exist only outside of slots, where the keys include the carried windows
    defaults=(None, None, None, None),
)
# tiles of a chunk: q = q̂, the queries that read the slots; output gradients do; a = q̂ k̂ᵀ and dp = do vᵀ
_Pairs = namedtuple("_Pairs", "q do a dp")
# pointers to a chunk's row and column factors, key slots and value slots; f: to the log-gates of the whole sequence
_Slots = namedtuple("_Slots", "row column f k v")


@triton.jit
def _slot_logits(b, s, i_m, i_t, count, o_j, m_e, stride, slots, c):
    """Return `(z, dp, row, column, log)` of BM slots: unscaled logits and gradients of the probabilities, both before
    multiplication by the row factors; row and column factors; log2 gates (0 unless STRONG)."""
    p_k, p_v, p_row, p_col, p_f = s.k + i_m, s.v + i_m, s.row + i_m, s.column + i_m, s.f + i_m
    b_z = tl.dot(b.q, tiles.load_columns(p_k, c.M, c.K, c.BM), input_precision=c.DOT)
    b_d = tl.dot(b.do, tiles.load_columns(p_v, c.M, c.V, c.BM), input_precision=c.DOT)
    b_col, b_log = tiles.load_factors(p_col, i_t >= 0, 0.0, c.M, c.BT, c.BM), 0.0
    size = c.BT >> count
    o_r = tl.arange(0, c.BT)
    r_t, r_j = o_r[:, None], o_r[None, :]
    if c.STRONG:
        b_log = tiles.log2_gates(tiles.load_gates(p_f, o_j, m_e, stride, slots, c.BM), c.DOT)
        b_start = tiles.block_to_start(b_log, size, c.BT, c.DOT)
        b_z *= b_start
        b_d *= b_start
        for i in range(count):
            half = (c.BT // 2) >> i
            b_boundary = tiles.block_to_boundary(b_log, size, half, c.BT, c.DOT)
            m_h = tiles.opposite_pairs(r_t, r_j, half)
            b_h = tiles.as_factor(b_col * b_boundary, c.FACTOR, c.DOT)
            b_z += b_boundary * tl.dot(
                tiles.as_factor(tl.where(m_h, b.a, 0.0), c.FACTOR, c.DOT), b_h, input_precision=c.DOT
            )
            b_d += b_boundary * tl.dot(
                tiles.as_factor(tl.where(m_h, b.dp, 0.0), c.FACTOR, c.DOT), b_h, input_precision=c.DOT
            )
    m_b = tiles.block_pairs(r_t, r_j, size)
    b_z = tl.dot(tiles.as_factor(tl.where(m_b, b.a, 0.0), c.FACTOR, c.DOT), b_col, b_z, input_precision=c.DOT)
    b_d = tl.dot(tiles.as_factor(tl.where(m_b, b.dp, 0.0), c.FACTOR, c.DOT), b_col, b_d, input_precision=c.DOT)
    return b_z, b_d, tiles.load_factors(p_row, i_t >= 0, 1.0, c.M, c.BT, c.BM), b_col, b_log


@triton.jit
def _window(b_q, b_do, b_lse, t, shift, chunk, at, scale_2, c):
    """Return BN window keys `[BN, K]`, their probabilities `[BT, BN]`, and do · v `[BT, BN]`.

    The keys begin `shift` keys after the chunk's first one.
    """
    o_n, r_t = tl.arange(0, c.BN), tl.arange(0, c.BT)[:, None]
    o_jn = chunk.i_t * c.BT + shift + o_n
    m_jn = (o_jn >= chunk.oldest) & (o_jn < chunk.keys)
    b_kn = tiles.load_rows(t.k + chunk.begin_k * c.K, o_jn, m_jn, at.H * c.K, c.K)
    b_vn = tiles.load_rows(t.v + chunk.begin_k * c.V, o_jn, m_jn, at.H * c.V, c.V)
    m_wn = ((shift + o_n)[None, :] > r_t) & ((shift + o_n)[None, :] <= r_t + at.window) & m_jn[None, :]
    b_s = tl.dot(b_q, tl.trans(b_kn), input_precision=c.DOT) * scale_2 - b_lse[:, None]
    b_s = tl.exp2(tl.where(m_wn, b_s, float("-inf")))
    return b_kn, b_s, tl.dot(b_do, tl.trans(b_vn), input_precision=c.DOT)


@triton.jit
def _queries(chunk, t, at, c):
    """Store dq, dq_slots and the fields of `Softmax` for a query chunk of one query head."""
    i_t, keys, oldest, length, count, entry, begin_q, begin_k, _, _, _ = chunk
    HQ = at.H * c.GROUP
    o_r = tl.arange(0, c.BT)
    first = i_t * c.BT
    o_q = first + at.window - at.before + o_r
    m_q = (o_q >= 0) & (o_q < length)
    o_j = first + o_r
    m_j = (o_j >= oldest) & (o_j < keys)

    b_do = tiles.load_rows(t.do + begin_q * c.V, o_q, m_q, HQ * c.V, c.V)
    p_row = begin_q + o_q.to(tl.int64) * HQ
    # rows without a query get lse = ∞, which makes their probabilities 0
    b_lse = tl.load(t.lse + p_row, mask=m_q, other=float("inf"))

    b_q, b_qs, b_ks = tiles.load_pairs(t, chunk, o_q, m_q, o_j, m_j, at, c)
    b_a = tl.dot(b_qs, tl.trans(b_ks), input_precision=c.DOT)
    b_dp = tl.dot(
        b_do, tl.trans(tiles.load_rows(t.v + begin_k * c.V, o_j, m_j, at.H * c.V, c.V)), input_precision=c.DOT
    )
    r_t, r_j = o_r[:, None], o_r[None, :]
    size = c.BT >> count
    m_b = tiles.block_pairs(r_t, r_j, size)
    m_e = (o_j >= 0) & (o_j < keys - at.window)
    scale_2 = t.scale * LOG2_E
    b_w = tl.zeros([c.BT, c.BT], dtype=tl.float32)
    shift_0 = 0
    if not c.OWN_SLOT_KEYS:
        # slots and window use the same keys, so q kᵀ of the chunk, computed above, also serves the window
        shift_0 = c.BT
        m_w = (r_j > r_t) & (r_j <= r_t + at.window) & m_j[None, :]
        b_w += tl.exp2(tl.where(m_w, b_a * scale_2 - b_lse[:, None], float("-inf")))
    o_m = tl.arange(0, c.BM)[None, :]
    shift_0 += tl.maximum(oldest - first - shift_0, 0) // c.BN * c.BN
    shift_1 = tl.minimum(c.BT + at.window, keys - first)
    slots = _Slots(
        t.row + entry * c.BT * c.M, t.column + entry * c.BT * c.M, t.f + begin_k * c.SLOTS,
        t.states_k + entry * c.K * c.M, t.states_v + entry * c.V * c.M,
    )  # fmt: skip
    pairs = _Pairs(b_qs, b_do, b_a, b_dp)
    if c.SHORT:
        # δ is computed from p and dp: if all slots are nearly equal, dz sums to 0 only if δ is rounded like p and dp
        b_delta = tl.sum(b_w * b_dp, 1)
        for shift in range(shift_0, shift_1, c.BN):
            _kn, b_s, b_ds = _window(b_q, b_do, b_lse, t, shift, chunk, at, scale_2, c)
            b_delta += tl.sum(b_s * b_ds, 1)
        if c.M > c.BM:
            for i_m in tl.range(0, c.M, c.BM, num_stages=1):
                b_z, b_d, b_row, b_col, b_log = _slot_logits(
                    pairs, slots, i_m, i_t, count, o_j, m_e, at.H * c.SLOTS, c.SLOTS - i_m, c
                )
                b_p = tl.exp2(tl.where(i_m + o_m < c.SLOTS, b_z * b_row * scale_2, float("-inf")) - b_lse[:, None])
                b_delta += tl.sum(b_p * b_d * b_row, 1)
    else:
        b_o = tiles.load_rows(t.o + begin_q * c.V, o_q, m_q, HQ * c.V, c.V)
        b_delta = tl.sum(b_do.to(tl.float32) * b_o.to(tl.float32), 1)
    if c.M <= c.BM:
        b_z, b_d, b_row, b_col, b_log = _slot_logits(pairs, slots, 0, i_t, count, o_j, m_e, at.H * c.SLOTS, c.SLOTS, c)
        b_p = tl.exp2(tl.where(o_m < c.SLOTS, b_z * b_row * scale_2, float("-inf")) - b_lse[:, None])
        if c.SHORT:
            b_delta += tl.sum(b_p * b_d * b_row, 1)
    tl.store(t.delta + p_row, b_delta, mask=m_q)

    b_w = tl.zeros([c.BT, c.BT], dtype=tl.float32)
    b_dq = tl.zeros([c.BT, c.K], dtype=tl.float32)
    for i_m in tl.range(0, c.M, c.BM, num_stages=1):
        if c.M > c.BM:
            b_z, b_d, b_row, b_col, b_log = _slot_logits(
                pairs, slots, i_m, i_t, count, o_j, m_e, at.H * c.SLOTS, c.SLOTS - i_m, c
            )
            b_p = tl.exp2(tl.where(i_m + o_m < c.SLOTS, b_z * b_row * scale_2, float("-inf")) - b_lse[:, None])
        b_y = tiles.as_factor(b_p * b_row, c.FACTOR, c.DOT)
        tiles.store_by_slot(t.p + begin_q * c.M + i_m, b_y, o_q, m_q, HQ, c.M, c.BM)
        # x uses the same rounded factors as the key gradients, so that the rounding errors of both cancel in df
        b_x = b_y.to(tl.float32) * b_d
        b_y = tiles.as_factor(b_p * (b_d * b_row - b_delta[:, None]) * (t.scale * b_row), c.FACTOR, c.DOT)
        tiles.store_by_slot(t.dz + begin_q * c.M + i_m, b_y, o_q, m_q, HQ, c.M, c.BM)
        tiles.store_by_slot(t.x + begin_q * c.M + i_m, b_x + b_y.to(tl.float32) * b_z, o_q, m_q, HQ, c.M, c.BM)
        b_w += tl.where(m_b, tl.dot(b_y, tl.trans(b_col), input_precision=c.DOT), 0.0)
        b_ys = b_y.to(b_q.dtype)
        if c.STRONG:
            b_ys = (b_y * tiles.block_to_start(b_log, size, c.BT, c.DOT)).to(b_q.dtype)
            for i in range(count):
                half = (c.BT // 2) >> i
                b_boundary = tiles.block_to_boundary(b_log, size, half, c.BT, c.DOT)
                b_h = tl.trans(tiles.as_factor(b_col * b_boundary, c.FACTOR, c.DOT))
                b_h = tl.dot(tiles.as_factor(b_y * b_boundary, c.FACTOR, c.DOT), b_h, input_precision=c.DOT)
                b_w += tl.where(tiles.opposite_pairs(r_t, r_j, half), b_h, 0.0)
        b_dq = tl.dot(b_ys, tl.trans(tiles.load_columns(slots.k + i_m, c.M, c.K, c.BM)), b_dq, input_precision=c.DOT)
    if not c.OWN_SLOT_KEYS:
        # compute the window's probabilities again instead of holding them, which saves registers
        b_ks = tiles.load_rows(t.k + begin_k * c.K, o_j, m_j, at.H * c.K, c.K)
        b_a = tl.dot(b_q, tl.trans(b_ks), input_precision=c.DOT) * scale_2 - b_lse[:, None]
        b_a = tl.exp2(tl.where(m_w, b_a, float("-inf")))
        b_dp = tl.dot(
            b_do, tl.trans(tiles.load_rows(t.v + begin_k * c.V, o_j, m_j, at.H * c.V, c.V)), input_precision=c.DOT
        )
        b_w += b_a * (b_dp - b_delta[:, None]) * t.scale
    b_dq = tl.dot(b_w.to(b_q.dtype), b_ks, b_dq, input_precision=c.DOT)
    if c.OWN_SLOT_KEYS:
        tiles.store_rows(t.dq_slots + begin_q * c.K, b_dq, o_q, m_q, HQ * c.K, c.K)
        b_dq = tl.zeros([c.BT, c.K], dtype=tl.float32)
    for shift in range(shift_0, shift_1, c.BN):
        b_kn, b_s, b_ds = _window(b_q, b_do, b_lse, t, shift, chunk, at, scale_2, c)
        b_s *= (b_ds - b_delta[:, None]) * t.scale
        b_dq = tl.dot(b_s.to(b_q.dtype), b_kn, b_dq, input_precision=c.DOT)
    tiles.store_rows(t.dq + begin_q * c.K, b_dq, o_q, m_q, HQ * c.K, c.K)


@cached_launch
@triton.jit(do_not_specialize=SIZES)
def slot_window_backward_queries_kernel(
    q, k, v, f, q_slots, k_slots, splits, row, column, states_k, states_v, start, cu_seqlens, o, lse, do, dq, dq_slots,
    p, dz, x, delta, scale, T, N, H, before, window, chunks, entries, extra, lead, M: tl.constexpr, SLOTS,
    BM: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr, STRONG: tl.constexpr,
    HEADS: tl.constexpr, GROUP: tl.constexpr, OWN_SLOT_KEYS: tl.constexpr, FACTOR: tl.constexpr, DOT: tl.constexpr,
    SHORT: tl.constexpr,
):  # fmt: skip
    """Store dq, and dq_slots if OWN_SLOT_KEYS, of a query chunk for HEADS query heads, and the fields of `Softmax`: p,
    dz, x and delta.

    With STRONG, compute only strong chunks (in which a slot decays by more than 80 bits), else only the others. SHORT:
    the window is short, so that δ is summed from probabilities instead of from the rounded o.
    """
    each_head_of_queries(
        _queries,
        _Tensors(
            q, k, v, f, q_slots, k_slots, row, column, states_k, states_v, o, lse, do, dq, dq_slots, p, dz, x, delta,
            scale,
        ),
        tiles.Chunks(splits, start, cu_seqlens, T, N, H, before, window, chunks, entries, extra, lead),
        tiles.Constants(M, SLOTS, BM, K, V, BT, GROUP, HEADS, STRONG, FACTOR, DOT, BN, OWN_SLOT_KEYS, SHORT),
    )  # fmt: skip


def query_gradients(launch, b: Backward, gates: Gates, softmax: Softmax, *, strong: bool) -> None:
    """Fill dq, dq_slots, `softmax` of strong chunks (a slot decays by over 80 bits) if `strong`, else of weak ones."""
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
