"""Forward kernel of a query chunk: logits of slots and window, one softmax over both, and the output (see README.md).

q̂ k̂ᵀ, q̂ S^K ──► z (slots) ─┐
                            ├─► one softmax ──► p S^V + (p W) v   through the slots
q kᵀ ──► ζ (window) ────────┘                 + π v               of the window, tile by tile (online softmax)
"""

from collections import namedtuple

import triton
import triton.language as tl

from tokenmix_core.chunking import cdiv
from tokenmix_core.kernels import LOG2_E, cached_launch
from tokenmix_nha.ops.slot_window import tile as tiles
from tokenmix_nha.ops.slot_window import tuning
from tokenmix_nha.ops.slot_window.head_loops import each_head_of_queries
from tokenmix_nha.ops.slot_window.tile import SIZES
from tokenmix_nha.ops.slot_window.types import Gates, Inputs, Layout, Pool, Results, Saved, of_pool

_Tensors = namedtuple(
    "_Tensors",
    "q k v f q_slots k_slots row column states_k states_v o lse scale ring_k ring_v ring_f ring_k_slots stride_ring_k "
    "stride_ring_v stride_ring_f stride_ring_k_slots",
)


@triton.jit
def _outputs(chunk, t, at, c):
    """Store o and the base-2 log-sum-exp for a query chunk of one query head."""
    i_t, keys, oldest, length, _, entry, begin_q, begin_k, slot, seen, i_h = chunk
    HQ = at.H * c.GROUP
    o_r = tl.arange(0, c.BT)
    first = i_t * c.BT
    o_q = first + at.window - at.before + o_r
    m_q = (o_q >= 0) & (o_q < length)
    o_j = first + o_r
    m_j = (o_j >= oldest) & (o_j < keys)
    scale = t.scale * LOG2_E

    b_q, b_qs, b_ks = tiles.load_pairs(t, chunk, o_q, m_q, o_j, m_j, at, c)
    b_a = tl.dot(b_qs, tl.trans(b_ks), input_precision=c.DOT)
    b_z = tl.dot(b_qs, tiles.load_columns(t.states_k + entry * c.K * c.M, c.M, c.K, c.BM), input_precision=c.DOT)
    m_e = m_j & (o_j < keys - at.window)
    r_t, r_j = o_r[:, None], o_r[None, :]
    if c.STRONG:
        # the Hopper scan only finds strong chunks (a slot decays by over 80 bits); count their halvings here, and store
        # the count for the backward pass
        b_f = tiles.load_ring_gates(
            t.f + begin_k * c.SLOTS, o_j, m_e, at.H * c.SLOTS, c.SLOTS, t.ring_f, t.stride_ring_f, i_h * c.SLOTS,
            slot, seen, at.before, c.BM,
        )  # fmt: skip
        b_log = tiles.log2_gates(b_f, c.DOT)
        count = tiles.halvings(b_log, 1, c.BT, c.DOT)
        tl.store(at.splits + entry, count)
        size = c.BT >> count
        b_g = tiles.gates_between(b_log, (o_r & -size) - 1, o_r, c.BT, c.DOT)
        b_row, b_col = tl.exp2(b_g), tiles.as_factor(tiles.enter_weight(b_f) * tl.exp2(-b_g), c.FACTOR, c.DOT)
    else:
        size = c.BT
        b_row = tiles.load_factors(t.row + entry * c.BT * c.M, i_t >= 0, 1.0, c.M, c.BT, c.BM)
        b_col = tiles.load_factors(t.column + entry * c.BT * c.M, i_t >= 0, 0.0, c.M, c.BT, c.BM)
    m_b = tiles.block_pairs(r_t, r_j, size)
    if c.STRONG:
        b_z *= tiles.block_to_start(b_log, size, c.BT, c.DOT)
        for i in range(count):
            half = (c.BT // 2) >> i
            b_boundary = tiles.block_to_boundary(b_log, size, half, c.BT, c.DOT)
            b_h = tiles.as_factor(tl.where(tiles.opposite_pairs(r_t, r_j, half), b_a, 0.0), c.FACTOR, c.DOT)
            b_z += b_boundary * tl.dot(b_h, tiles.as_factor(b_col * b_boundary, c.FACTOR, c.DOT), input_precision=c.DOT)
    b_z = tl.dot(tiles.as_factor(tl.where(m_b, b_a, 0.0), c.FACTOR, c.DOT), b_col, b_z, input_precision=c.DOT) * b_row
    # the columns from SLOTS on are padding
    b_z = tl.where((tl.arange(0, c.BM) < c.SLOTS)[None, :], b_z * scale, float("-inf"))
    b_max = tl.max(b_z, 1)

    # the chunk's queries lie `window` tokens after its keys: query i sees keys j ≤ i in the slots, keys j > i in its
    # window. If both use the same keys, one tile of q kᵀ serves both; else the window's loop starts at the chunk.
    shift_0 = 0
    b_w = tl.full([c.BT, c.BT], float("-inf"), dtype=tl.float32)
    if not c.OWN_SLOT_KEYS:
        shift_0 = c.BT
        m_w = (o_r[None, :] > o_r[:, None]) & (o_r[None, :] <= o_r[:, None] + at.window) & m_j[None, :]
        b_w = tl.where(m_w, b_a * scale, b_w)
        b_max = tl.maximum(b_max, tl.max(b_w, 1))
    b_p = tl.exp2(b_z - b_max[:, None])
    b_w = tl.exp2(b_w - b_max[:, None])
    b_l = tl.sum(b_p, 1) + tl.sum(b_w, 1)
    b_y = tiles.as_factor(b_p * b_row, c.FACTOR, c.DOT)
    b_w += tl.where(m_b, tl.dot(b_y, tl.trans(b_col), input_precision=c.DOT), 0.0)
    b_ys = b_y.to(b_q.dtype)
    if c.STRONG:
        b_ys = (b_y * tiles.block_to_start(b_log, size, c.BT, c.DOT)).to(b_q.dtype)
        for i in range(count):
            half = (c.BT // 2) >> i
            b_boundary = tiles.block_to_boundary(b_log, size, half, c.BT, c.DOT)
            b_h = tl.dot(
                tiles.as_factor(b_y * b_boundary, c.FACTOR, c.DOT),
                tl.trans(tiles.as_factor(b_col * b_boundary, c.FACTOR, c.DOT)),
                input_precision=c.DOT,
            )
            b_w += tl.where(tiles.opposite_pairs(r_t, r_j, half), b_h, 0.0)
    b_o = tl.dot(
        b_ys, tl.trans(tiles.load_columns(t.states_v + entry * c.V * c.M, c.M, c.V, c.BM)), input_precision=c.DOT
    )
    b_v = tiles.load_keys(t.v, t.ring_v, t.stride_ring_v, o_j, m_j, chunk, at, c.V)
    b_o = tl.dot(b_w.to(b_q.dtype), b_v, b_o, input_precision=c.DOT)

    # loop over the remaining window tiles, starting at the first valid key
    o_n = tl.arange(0, c.BN)
    skip = tl.maximum(oldest - first - shift_0, 0) // c.BN * c.BN
    for shift in range(shift_0 + skip, tl.minimum(c.BT + at.window, keys - first), c.BN):
        o_jn = first + shift + o_n
        m_jn = (o_jn >= oldest) & (o_jn < keys)
        b_kn = tiles.load_keys(t.k, t.ring_k, t.stride_ring_k, o_jn, m_jn, chunk, at, c.K)
        b_vn = tiles.load_keys(t.v, t.ring_v, t.stride_ring_v, o_jn, m_jn, chunk, at, c.V)
        o_s = (shift + o_n)[None, :] - o_r[:, None]
        m_wn = (o_s > 0) & (o_s <= at.window) & m_jn[None, :]
        b_s = tl.where(m_wn, tl.dot(b_q, tl.trans(b_kn), input_precision=c.DOT) * scale, float("-inf"))
        b_new = tl.maximum(b_max, tl.max(b_s, 1))
        b_shrink = tl.exp2(b_max - b_new)
        b_s = tl.exp2(b_s - b_new[:, None])
        b_l = b_l * b_shrink + tl.sum(b_s, 1)
        b_o = tl.dot(b_s.to(b_q.dtype), b_vn, b_o * b_shrink[:, None], input_precision=c.DOT)
        b_max = b_new

    tiles.store_rows(t.o + begin_q * c.V, b_o / b_l[:, None], o_q, m_q, HQ * c.V, c.V)
    tl.store(t.lse + begin_q + o_q.to(tl.int64) * HQ, b_max + tl.log2(b_l), mask=m_q)


@cached_launch
@triton.jit(do_not_specialize=SIZES)
def slot_window_forward_kernel(
    q, k, v, f, q_slots, k_slots, splits, row, column, states_k, states_v, start, cu_seqlens, o, lse, scale,
    ring_k, ring_v, ring_f, ring_k_slots, length, stride_ring_k, stride_ring_v, stride_ring_f, stride_ring_k_slots,
    stride_length, slots, fresh, T, N, H, before, window, chunks, entries, extra, lead, M: tl.constexpr, SLOTS,
    BM: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr, STRONG: tl.constexpr,
    HEADS: tl.constexpr, GROUP: tl.constexpr, OWN_SLOT_KEYS: tl.constexpr, FACTOR: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Store o `[BT, V]` and the base-2 log-sum-exp for a query chunk and HEADS query heads.

    With STRONG, compute only strong chunks (in which a slot decays by more than 80 bits), else only the others.
    """
    each_head_of_queries(
        _outputs,
        _Tensors(
            q, k, v, f, q_slots, k_slots, row, column, states_k, states_v, o, lse, scale, ring_k, ring_v, ring_f,
            ring_k_slots, stride_ring_k, stride_ring_v, stride_ring_f, stride_ring_k_slots,
        ),
        tiles.Chunks(
            splits, start, cu_seqlens, T, N, H, before, window, chunks, entries, extra, lead, slots, fresh, length,
            stride_length,
        ),
        tiles.Constants(M, SLOTS, BM, K, V, BT, GROUP, HEADS, STRONG, FACTOR, DOT, BN, OWN_SLOT_KEYS),
    )  # fmt: skip


def window_outputs(
    launch, x: Inputs, y: Layout, gates: Gates, results: Results, saved: Saved, pool: Pool | None = None, *,
    strong: bool,
) -> None:  # fmt: skip
    """Fill o and the log-sum-exp of strong chunks (a slot decays by over 80 bits) if `strong`, else of weak ones.

    With `pool`, the carried windows are in its ring buffers.

    Programs for strong chunks compute the gates' factors themselves; programs for weak chunks read `gates`.
    """
    tile = tuning.tile(y.M, y.window, x.q.dtype)
    chunks, heads = y.query_chunks * y.rows, y.H * y.GROUP
    each = tuning.strong_heads(chunks, heads) if strong else 1
    launch(
        slot_window_forward_kernel, (chunks, cdiv(heads, each)),
        q=x.q, k=x.k, v=x.v, f=x.f, q_slots=x.q_slots, k_slots=x.k_slots, splits=saved.splits, row=gates.row,
        column=gates.column, states_k=saved.states_k, states_v=saved.states_v, start=x.start, cu_seqlens=x.cu_seqlens,
        o=results.o, lse=saved.lse, scale=x.scale, **of_pool(pool, "ring_k", "ring_v", "ring_f", "ring_k_slots"),
        **y.of_queries, **y.portable, BM=y.BM, BN=tile.BN, STRONG=strong, HEADS=each,
        OWN_SLOT_KEYS=x.k_slots is not None, num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
