"""Gradients of the log-gates of tokens that enter the slots; see README.md for the formula of df.

Tiles are transposed, `[token, query]`.
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

_Tensors = namedtuple("_Tensors", "q_slots k_slots v f row column end states_k states_v ds_k ds_v do p dz x df")


@triton.jit
def _pair_sums(b_x, b_y, b_e, p_f, count, o_j, m_e, stride, slots, c):
    """Return `b_e` + Σ_{t ≥ j} x[j, t] y_m(t) `[token j, slot m]`, for the queries t of a chunk and BM slots.

    y contains the row factors of the queries; the caller multiplies the result by the column factors of the tokens. If
    STRONG, pairs in different blocks are weighted by the decay to the boundary between them, as in `pair_weights`.
    """
    o_r = tl.arange(0, c.BT)
    r_j, r_t = o_r[:, None], o_r[None, :]
    size = c.BT >> count
    b_h = tiles.as_factor(tl.where(tiles.block_pairs(r_t, r_j, size), b_x, 0.0), c.FACTOR, c.DOT)
    b_e = tl.dot(b_h, b_y, b_e, input_precision=c.DOT)
    if c.STRONG:
        b_log = tiles.log2_gates(tiles.load_gates(p_f, o_j, m_e, stride, slots, c.BM), c.DOT)
        for i in range(count):
            half = (c.BT // 2) >> i
            b_boundary = tiles.block_to_boundary(b_log, size, half, c.BT, c.DOT)
            b_h = tiles.as_factor(tl.where(tiles.opposite_pairs(r_t, r_j, half), b_x, 0.0), c.FACTOR, c.DOT)
            b_e += b_boundary * tl.dot(b_h, tiles.as_factor(b_y * b_boundary, c.FACTOR, c.DOT), input_precision=c.DOT)
    return b_e


@triton.jit
def _store_gates(p, b_x, o_j, m_j, stride, slots, BM: tl.constexpr):
    o_m = tl.arange(0, BM)[None, :]
    p = p + o_j.to(tl.int64)[:, None] * stride + o_m
    tl.store(p, b_x.to(p.dtype.element_ty), mask=m_j[:, None] & (o_m < slots))


@triton.jit
def _column_dots(p_x, p_y, BM: tl.constexpr, M: tl.constexpr, D: tl.constexpr):
    """Return ⟨x_m, y_m⟩ for BM columns m of two tiles `[D, M]`."""
    return tl.sum(
        tiles.load_columns(p_x, M, D, BM).to(tl.float32) * tiles.load_columns(p_y, M, D, BM).to(tl.float32), 0
    )


@triton.jit
def _gates(chunk, t, at, c):
    """Store df for a chunk of one head and the BM slots of the program."""
    i_m = tl.program_id(2) * c.BM
    first, keys, oldest, length, count, entry, begin_k, begin_q = chunk
    HQ = at.H * c.GROUP
    o_r = tl.arange(0, c.BT)
    o_j, m_j, m_s, m_e, o_q, m_q = tiles.token_rows(first, keys, oldest, length, at.before, at.window, c.BT)
    p_f = t.f + begin_k * c.SLOTS + i_m
    p_df = t.df + begin_k * c.SLOTS + i_m
    if first >= keys - at.window:
        _store_gates(p_df, tl.zeros([c.BT, c.BM], dtype=tl.float32), o_j, m_s, at.H * c.SLOTS, c.SLOTS - i_m, c.BM)
        return
    p_dsk, p_dsv = t.ds_k + entry * c.K * c.M, t.ds_v + entry * c.V * c.M
    p_col = t.column + entry * c.BT * c.M

    # e_j of README.md has two parts: b_e from the chunk's queries, and b_last from the slots at the chunk's end
    b_ks = tiles.load_rows(t.k_slots + begin_k * c.K, o_j, m_j, at.H * c.K, c.K)
    b_v = tiles.load_rows(t.v + begin_k * c.V, o_j, m_j, at.H * c.V, c.V)
    b_e = tl.zeros([c.BT, c.BM], dtype=tl.float32)
    for i_g in range(c.GROUP):
        p_row = begin_q + i_g
        b_q = tiles.load_rows(t.q_slots + p_row * c.K, o_q, m_q, HQ * c.K, c.K)
        b_a = tl.dot(b_ks, tl.trans(b_q), input_precision=c.DOT)
        b_y = tiles.load_by_slot(t.dz + p_row * c.M + i_m, o_q, m_q, HQ, c.M, c.BM)
        b_e = _pair_sums(b_a, b_y, b_e, p_f, count, o_j, m_e, at.H * c.SLOTS, c.SLOTS - i_m, c)
        b_do = tiles.load_rows(t.do + p_row * c.V, o_q, m_q, HQ * c.V, c.V)
        b_a = tl.dot(b_v, tl.trans(b_do), input_precision=c.DOT)
        b_y = tiles.load_by_slot(t.p + p_row * c.M + i_m, o_q, m_q, HQ, c.M, c.BM)
        b_e = _pair_sums(b_a, b_y, b_e, p_f, count, o_j, m_e, at.H * c.SLOTS, c.SLOTS - i_m, c)
    b_last = tl.dot(b_ks, tiles.load_columns(p_dsk + i_m, c.M, c.K, c.BM), input_precision=c.DOT)
    b_last = tl.dot(b_v, tiles.load_columns(p_dsv + i_m, c.M, c.V, c.BM), b_last, input_precision=c.DOT)
    b_f = tiles.load_gates(p_f, o_j, m_e, at.H * c.SLOTS, c.SLOTS - i_m, c.BM)
    b_inverse = 1.0 / tiles.load_columns(t.row + entry * c.BT * c.M + i_m, c.M, c.BT, c.BM)
    o_m = tl.arange(0, c.BM)
    b_end = tl.exp2(tl.load(t.end + entry * c.M + i_m + o_m, mask=o_m < c.M, other=0.0))
    if c.STRONG:
        b_last *= tl.exp2(tiles.gates_between(tiles.log2_gates(b_f, c.DOT), o_r, c.BT - 1, c.BT, c.DOT))
    else:
        b_last *= b_end[None, :] * b_inverse
    b_enter = tiles.enter_weight(b_f)
    b_df = (1.0 - b_enter) * (b_e * b_inverse + b_last)
    b_last *= b_enter
    b_x = -b_e * tiles.load_columns(p_col + i_m, c.M, c.BT, c.BM).to(tl.float32) - b_last
    for i_g in range(c.GROUP):
        b_x += tiles.load_by_slot(t.x + (begin_q + i_g) * c.M + i_m, o_q, m_q, HQ, c.M, c.BM)
    b_later = tl.where(o_r[None, :] >= o_r[:, None], 1.0, 0.0)
    b_df = tiles.sums_of_rows(b_later, tl.where(m_e[:, None], b_x, 0.0), c.DOT) - b_df
    b_dot = _column_dots(p_dsk + i_m, t.states_k + entry * c.K * c.M + i_m, c.BM, c.M, c.K)
    b_dot += _column_dots(p_dsv + i_m, t.states_v + entry * c.V * c.M + i_m, c.BM, c.M, c.V)
    b_df += (b_dot * b_end + tl.sum(b_last, 0))[None, :]
    # the gradient of a clamped gate is 0
    b_df = tl.where(m_e[:, None] & (tiles.log2_gates(b_f, c.DOT) == b_f * LOG2_E), b_df, 0.0)
    _store_gates(p_df, b_df, o_j, m_s, at.H * c.SLOTS, c.SLOTS - i_m, c.BM)


@cached_launch
@triton.jit(do_not_specialize=SIZES)
def slot_window_backward_gates_kernel(
    q_slots, k_slots, v, f, splits, row, column, end, states_k, states_v, ds_k, ds_v, start, cu_seqlens, do, p, dz, x,
    df, T, N, H, before, window, chunks, entries, M: tl.constexpr, SLOTS, BM: tl.constexpr, K: tl.constexpr,
    V: tl.constexpr, BT: tl.constexpr, STRONG: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr,
    FACTOR: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Store df_j = ⟨dS_j, α_j (S_{j−1} − (k̂_j, v_j))⟩ `[BT, BM]` for the tokens of a chunk and HEADS heads.

    S_j: slots after token j; α: gates; k̂: keys that enter the slots.
    With STRONG, compute only strong chunks (in which a slot decays by more than 80 bits), else only the others.
    """
    each_head_of_keys(
        _gates,
        _Tensors(q_slots, k_slots, v, f, row, column, end, states_k, states_v, ds_k, ds_v, do, p, dz, x, df),
        tiles.Chunks(splits, start, cu_seqlens, T, N, H, before, window, chunks, entries),
        tiles.Constants(M, SLOTS, BM, K, V, BT, GROUP, HEADS, STRONG, FACTOR, DOT),
    )  # fmt: skip


def gate_gradients(
    launch, b: Backward, gates: Gates, softmax: Softmax, slots: SlotGradients, *, strong: bool
) -> None:  # fmt: skip
    """Fill df for the strong chunks (a slot decays by more than 80 bits) if `strong`, else for the weak ones."""
    x, y, saved = b.x, b.y, b.saved
    tile = tuning.tile(y.M, y.window, x.q.dtype)
    each = tuning.strong_heads(y.key_chunks * y.rows, y.H) if strong else 1
    launch(
        slot_window_backward_gates_kernel, (y.key_chunks * y.rows, cdiv(y.H, each), cdiv(y.M, tile.BM)),
        q_slots=x.q if x.q_slots is None else x.q_slots, k_slots=x.k if x.k_slots is None else x.k_slots, v=x.v, f=x.f,
        splits=saved.splits, row=gates.row, column=gates.column, end=saved.end, states_k=saved.states_k,
        states_v=saved.states_v, **slots._asdict(), start=x.start, cu_seqlens=x.cu_seqlens, do=b.do, p=softmax.p,
        dz=softmax.dz, x=softmax.x, df=b.grads.df, **y.of_keys, **y.portable, BM=tile.BM, STRONG=strong, HEADS=each,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
