"""Gates of chunks: each token's weight in the slots at the chunk's end, and factors of its weights inside the chunk."""

from collections import namedtuple

import torch
import triton
import triton.language as tl

from tokenmix_core.chunking import cdiv
from tokenmix_core.kernels import cached_launch
from tokenmix_nha.ops.slot_window import tile as tiles
from tokenmix_nha.ops.slot_window import tuning
from tokenmix_nha.ops.slot_window.tile import SIZES
from tokenmix_nha.ops.slot_window.types import Gates, Inputs, Layout, Pool, Saved, empty, of_pool

_Factors = namedtuple("_Factors", "weight row column end")
# a head's ring buffer of log-gates in a slot of a pool: see `tile.load_ring_gates`
_Ring = namedtuple("_Ring", "ring stride offset slot seen oldest")


@triton.jit
def _gates(t, i_t, tile, p_f, entering, stride, r, at, c):
    """Store the gates' factors for a chunk of one head."""
    o_r, o_m = tl.arange(0, c.BT), tl.arange(0, c.BM)
    o_t = i_t * c.BT + o_r
    m_t = o_t < entering
    if r.ring is not None:
        m_t = m_t & (o_t >= r.oldest)
    b_f = tiles.load_ring_gates(
        p_f, o_t, m_t, stride, c.SLOTS, r.ring, r.stride, r.offset, r.slot, r.seen, at.before, c.BM
    )  # fmt: skip
    b_log = tiles.log2_gates(b_f, c.DOT)
    b_end = tl.sum(b_log, 0)
    b_g = tiles.gates_between(b_log, -1, o_r, c.BT, c.DOT)
    b_enter = tiles.enter_weight(b_f)
    b_weight = b_enter * tl.exp2(tl.minimum(b_end[None, :] - b_g, 0.0))
    tiles.store_columns(t.weight + tile * c.BT * c.M, b_weight, c.M, c.BT, c.BM)
    tl.store(t.end + tile * c.M + o_m, b_end, mask=o_m < c.M)
    count = tiles.halvings(b_log, 1 if c.STRONG else 0, c.BT, c.DOT)
    tl.store(at.splits + tile, count)
    size = c.BT >> count
    b_g = tiles.gates_between(b_log, (o_r & -size) - 1, o_r, c.BT, c.DOT)
    b_col = tl.exp2(-b_g) * b_enter
    tiles.store_columns(t.row + tile * c.BT * c.M, tl.exp2(b_g), c.M, c.BT, c.BM)
    tiles.store_columns(
        t.column + tile * c.BT * c.M, tiles.as_factor(b_col, t.column.dtype.element_ty, c.DOT), c.M, c.BT, c.BM
    )


@cached_launch
@triton.jit(do_not_specialize=SIZES)
def slot_gates_kernel(
    f, weight, row, column, end, splits, cu_seqlens, ring_f, length, stride_ring_f, stride_length, slots, fresh, T, N,
    H, before, window, chunks, entries, M: tl.constexpr, SLOTS, BM: tl.constexpr, BT: tl.constexpr,
    HEADS: tl.constexpr, DOT: tl.constexpr, ONLY_STRONG: tl.constexpr,
):  # fmt: skip
    """Store for a chunk and HEADS heads: each token's weight in the slots at the chunk's end `[BT, M]`, row and column
    factors, the chunk's log2 decay `[M]`, and how often the chunk must be halved for factors within 2^±80.

    With ONLY_STRONG, `splits` is also an input, and only strong chunks, in which it is not 0, are computed.
    """
    at = tiles.Chunks(
        splits, None, cu_seqlens, T, N, H, before, window, chunks, entries, 0, 0, slots, fresh, length, stride_length
    )  # fmt: skip
    i_n, i_t, begin, tokens = tiles.locate_chunk(tl.program_id(0), at, before, BT)
    i_h = tl.program_id(1) * HEADS
    entering = tokens + before - window
    if i_t * BT >= entering:
        return
    tile = (tiles.first_entry(i_n, begin + i_n.to(tl.int64) * before, entries, cu_seqlens, BT) + i_t) * H
    slot, seen, oldest = tiles.earlier_tokens(i_n, at)
    begin = tiles.begin_of_keys(begin, i_n, at)
    o_h = i_h + tl.arange(0, HEADS)
    b_count = tl.full([HEADS], 1, tl.int32)
    if ONLY_STRONG:
        b_count = tl.load(splits + tile + o_h, mask=o_h < H, other=0)
        if tl.max(b_count, 0) == 0:
            return
    # disable loop-invariant code motion (LICM): indices that all heads share would be held, and registers would spill
    for i in tl.range(HEADS, disable_licm=True):
        if (tl.sum(tl.where(o_h == i_h + i, b_count, 0), 0) > 0) & (i_h + i < H):
            p_f = f + (begin * H + i_h + i) * SLOTS
            _gates(
                _Factors(weight, row, column, end), i_t, tile + i_h + i, p_f, entering, H * SLOTS,
                _Ring(ring_f, stride_ring_f, (i_h + i) * SLOTS, slot, seen, oldest), at,
                tiles.Constants(M, SLOTS, BM, None, None, BT, None, HEADS, ONLY_STRONG, None, DOT),
            )  # fmt: skip


def chunk_gates(
    launch, x: Inputs, y: Layout, saved: Saved, pool: Pool | None = None, *, only_strong: bool = False
) -> Gates:
    """Return the gates' factors of all chunks and fill `saved.end` and `saved.splits`.

    With `only_strong`, `saved.splits` is an input, and only the factors of strong chunks, where it is not 0, are
    computed. With `pool`, the carried windows are in its ring buffers.
    """
    shape = y.entries * y.rows, y.H, y.BT, y.M
    gates = Gates(*empty(x.q, ((shape, x.q.dtype), (shape, torch.float32), (shape, y.factor))))
    heads = tuning.strong_heads(y.key_chunks * y.rows, y.H) if only_strong else 1
    launch(
        slot_gates_kernel, (y.key_chunks * y.rows, cdiv(y.H, heads)),
        f=x.f, **gates._asdict(), end=saved.end, splits=saved.splits, cu_seqlens=x.cu_seqlens,
        **of_pool(pool, "ring_f"), **y.of_keys,
        M=y.M, SLOTS=y.SLOTS, BM=y.BM, BT=y.BT, HEADS=heads, DOT=y.DOT, ONLY_STRONG=only_strong,
        num_warps=4,
    )  # fmt: skip
    return gates
