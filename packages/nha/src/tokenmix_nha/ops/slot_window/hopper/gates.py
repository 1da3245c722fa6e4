"""Gluon device functions: chunk indices, gates of a weak chunk, async copies, and WGMMAs of one warpgroup."""

from collections import namedtuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from tokenmix_core.kernels.gluon import LOG2_E, async_load, barrier, mma_layout, opaque, opaque_tile, row_layout
from tokenmix_nha.ops.slot_window.tile import KeyChunk
from tokenmix_nha.ops.slot_window.tile import begin_of_keys as begin_of_keys
from tokenmix_nha.ops.slot_window.tile import earlier_tokens as earlier_tokens

# a head's ring buffer in a slot of a pool: the pool's tensor or None, the distance between slots, the head's first
# element in a slot, the slot, the number of the sequence's earlier tokens, and the size of the ring buffer in tokens
Ring = namedtuple("Ring", "tensor stride offset slot seen before")


@gluon.jit
def mma(a, b, N: gl.constexpr):
    """Start the WGMMA A B and return its accumulator, `[64, N]`."""
    zero = gl.zeros([64, N], gl.float32, mma_layout(N, 4))
    return warpgroup_mma(a, b, zero, use_acc=False, is_async=True)


@gluon.jit
def mma_add_opaque(a, b, b_sum):
    """Start the WGMMA A B + b_sum, with the smem addresses of A and B hidden from the compiler.

    Their descriptors are then computed again for each WGMMA; otherwise ptxas would hold the descriptors of all WGMMAs
    of a loop in registers.
    """
    if isinstance(a, gl.shared_memory_descriptor):
        a = opaque_tile(a)
    return warpgroup_mma(a, opaque_tile(b), b_sum, is_async=True)


@gluon.jit
def mma_opaque(a, b, N: gl.constexpr):
    """Start the WGMMA A B, `[64, N]`, with smem addresses hidden from the compiler as in `mma_add_opaque`."""
    if isinstance(a, gl.shared_memory_descriptor):
        a = opaque_tile(a)
    return mma(a, opaque_tile(b), N)


@gluon.jit
def as_left(b_x, N: gl.constexpr):
    """Convert an accumulator to the register layout of the left operand of a WGMMA with N columns."""
    return gl.convert_layout(b_x, gl.DotOperandLayout(0, mma_layout(N, 4), 2))


@gluon.jit
def rounded(b_x, dtype: gl.constexpr):
    """Round x to 16 bits, two elements per register.

    An opaque `mov` forces the rounding here; the compiler would delay it, and hold float32 values in registers until
    then.
    """
    b_x = b_x.to(dtype)
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [b_x], dtype=b_x.dtype, is_pure=False, pack=2)


@gluon.jit
def row_pointers(p_x, o_t, stride, ring):
    """Return pointers to rows `o_t` of a sequence's keys, values or gates; the tensor of `ring` may be None."""
    p_rows = p_x + o_t.to(gl.int64) * stride
    if ring.tensor is not None:
        o_ring = ((ring.seen + o_t) % ring.before).to(gl.int64) * stride
        p_rows = gl.where(o_t < ring.before, ring.tensor + (ring.slot * ring.stride + ring.offset + o_ring), p_rows)
        # Triton 3.9 does not see that rows from both tensors begin at multiples of 16 bytes
        p_rows = gl.multiple_of(p_rows, 16)
    return p_rows


@gluon.jit
def async_copy_keys(s_x, p_x, first, low, high, stride, ring):
    """Start an async copy of rows of a sequence's keys or values to smem, as `async_copy_tokens` does.

    The rows before `ring.before` are in a ring buffer, if there is one.
    """
    if ring.tensor is None:
        async_copy_tokens(s_x, p_x, first, low, high, stride)
    else:
        layout: gl.constexpr = row_layout(s_x.shape[1], 4)
        o_t = first + gl.arange(0, s_x.shape[0], gl.SliceLayout(1, layout))
        o_d = gl.arange(0, s_x.shape[1], gl.SliceLayout(0, layout))
        p_x = row_pointers(p_x, o_t, stride, ring)[:, None] + o_d[None, :]
        async_load(s_x, p_x, mask=((o_t >= low) & (o_t < high))[:, None])


@gluon.jit
def async_copy_tokens(s_x, p_x, first, low, high, stride, OPAQUE: gl.constexpr = False):
    """Start an async copy of rows of a matrix to smem, from row `first` on; rows outside [low, high) become 0.

    With OPAQUE, offsets are computed here again, so that they occupy no registers before this copy.
    """
    layout: gl.constexpr = row_layout(s_x.shape[1], 4)
    o_t = gl.arange(0, s_x.shape[0], gl.SliceLayout(1, layout))
    if OPAQUE:
        o_t = opaque(o_t)
    o_d = gl.arange(0, s_x.shape[1], gl.SliceLayout(0, layout))
    p_x += first.to(gl.int64) * stride
    m_t = (first + o_t >= low) & (first + o_t < high)
    async_load(s_x, p_x + (o_t * stride)[:, None] + o_d[None, :], mask=m_t[:, None])


@gluon.jit
def store(s_x, p_x, first, low, high, stride):
    """Copy an smem tile to rows of a matrix, from row `first` on; rows outside [low, high) are not written."""
    layout: gl.constexpr = row_layout(s_x.shape[1], 4)
    o_t = gl.arange(0, s_x.shape[0], gl.SliceLayout(1, layout))
    o_d = gl.arange(0, s_x.shape[1], gl.SliceLayout(0, layout))
    p_x += first.to(gl.int64) * stride
    m_t = (first + o_t >= low) & (first + o_t < high)
    gl.store(p_x + (o_t * stride)[:, None] + o_d[None, :], s_x.load(layout), mask=m_t[:, None])


@gluon.jit
def column_dots(s_x, s_y):
    """Return ⟨x_m, y_m⟩ for the columns m of two smem tiles `[D, M]`."""
    lines: gl.constexpr = row_layout(s_x.shape[1], 4)
    return gl.sum(s_x.load(lines).to(gl.float32) * s_y.load(lines).to(gl.float32), 0)


@gluon.jit
def locate_chunk(i_c, at, extra):
    """Return (sequence, chunk of the sequence, first query, number of queries): `tile.locate_chunk` for BT = 64."""
    if at.cu_seqlens is not None:
        sequences = 0
        for i in range(0, at.N, 128):
            o_n = i + gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0]))
            slots = (gl.load(at.cu_seqlens + o_n, mask=o_n < at.N, other=0).to(gl.int64) + o_n * extra) // 64 + o_n
            sequences += gl.sum(((slots <= i_c) & (o_n < at.N)).to(gl.int32), 0)
        i_n = sequences - 1
        begin = gl.load(at.cu_seqlens + i_n).to(gl.int64)
        length = (gl.load(at.cu_seqlens + i_n + 1).to(gl.int64) - begin).to(gl.int32)
        i_t = i_c - ((begin + i_n * extra) // 64 + i_n).to(gl.int32)
    else:
        i_n = i_c // at.chunks
        begin = i_n.to(gl.int64) * at.T
        length = at.T
        i_t = i_c - i_n * at.chunks
    return i_n, i_t, begin, length


@gluon.jit
def first_entry(i_n, begin_k, entries, cu_seqlens):
    """Return the index of a sequence's first chunk state, like `tile.first_entry` for BT = 64."""
    if cu_seqlens is not None:
        entry = begin_k // 64 + 2 * i_n
    else:
        entry = i_n.to(gl.int64) * entries
    return entry


@gluon.jit
def locate_keys(i_c, i_h, at, GROUP: gl.constexpr = 1):
    """Return the `KeyChunk` with index `i_c` for key head `i_h`; `begin_q` is that of the group's first query head."""
    i_n, i_t, begin, length = locate_chunk(i_c, at, at.before)
    begin_k = begin + i_n.to(gl.int64) * at.before
    first, keys = i_t * 64, length + at.before
    entry = (first_entry(i_n, begin_k, at.entries, at.cu_seqlens) + i_t) * at.H + i_h
    count = gl.where(first < keys, 0, -1)
    if first < keys - at.window:
        count = gl.load(at.splits + entry)
    oldest = 0
    if at.start is not None:
        oldest = gl.load(at.start + i_n)
    return KeyChunk(first, keys, oldest, length, count, entry, begin_k * at.H + i_h, (begin * at.H + i_h) * GROUP)


@gluon.jit
def load_gates(f, begin_k, o_t, m_t, H, SLOTS, M: gl.constexpr):
    """Load rows `o_t` of a head's log-gates as float32. Rows outside the mask and columns ≥ SLOTS get log-gate 0, so
    that no token enters there."""
    o_m = gl.arange(0, M, gl.SliceLayout(0, mma_layout(M, 4)))
    p_f = f + ((begin_k + o_t.to(gl.int64) * H) * SLOTS)[:, None] + o_m[None, :]
    return gl.load(p_f, mask=m_t[:, None] & (o_m < SLOTS)[None, :], other=0.0).to(gl.float32)


@gluon.jit
def load_ring_gates(f, begin_k, o_t, m_t, H, SLOTS, M: gl.constexpr, ring):
    """Load log-gates as `load_gates` does; the rows before `ring.before` are in a ring buffer, if there is one."""
    if ring.tensor is None:
        b_f = load_gates(f, begin_k, o_t, m_t, H, SLOTS, M)
    else:
        o_m = gl.arange(0, M, gl.SliceLayout(0, mma_layout(M, 4)))
        p_f = row_pointers(f + begin_k * SLOTS, o_t, H * SLOTS, ring)[:, None] + o_m[None, :]
        b_f = gl.load(p_f, mask=m_t[:, None] & (o_m < SLOTS)[None, :], other=0.0).to(gl.float32)
    return b_f


@gluon.jit
def store_gates(df, b_df, begin_k, first, oldest, entering, keys, H, SLOTS):
    """Store the gradients of a chunk's log-gates; infinite values, and tokens that do not enter the slots, give 0."""
    M: gl.constexpr = b_df.shape[1]
    o_t = first + opaque(gl.arange(0, 64, gl.SliceLayout(1, mma_layout(M, 4))))
    o_m = gl.arange(0, M, gl.SliceLayout(0, mma_layout(M, 4)))
    m_e = ((o_t >= oldest) & (o_t < entering))[:, None]
    o_df = ((begin_k + o_t.to(gl.int64) * H) * SLOTS)[:, None] + o_m[None, :]
    b_df = gl.where(m_e & (gl.abs(b_df) < float("inf")), b_df, 0.0)
    gl.store(df + o_df, b_df.to(df.dtype.element_ty), mask=(o_t < keys)[:, None] & (o_m < SLOTS)[None, :])


@gluon.jit
def enter_weight(b_f):
    """Return 1 − exp(f) for f ≤ 0; near 0 by a power series, because the difference would lose precision."""
    b_small = -b_f * (1.0 + b_f * (0.5 + b_f * (1 / 6 + b_f * (1 / 24 + b_f * (1 / 120)))))
    return gl.where(b_f > -0.1, b_small, 1.0 - gl.exp2(b_f * LOG2_E))


@gluon.jit
def sums_of_rows(b_x, s_high, s_low, LATER: gl.constexpr):
    """Return the inclusive cumulative sums of x `[64, M]` over its rows, starting at the last row if LATER.

    WGMMAs multiply a triangular matrix of ones by the two bf16 parts of x, which are stored in `s_high` and `s_low`. No
    warp may still be reading these two buffers.
    """
    M: gl.constexpr = b_x.shape[1]
    left: gl.constexpr = gl.DotOperandLayout(0, mma_layout(M, 4), 2)
    b_high = rounded(b_x, s_high.dtype)
    s_high.store(b_high)
    s_low.store((b_x - b_high.to(gl.float32)).to(s_low.dtype))
    # without `opaque`, ptxas 12.8 may overwrite a register of b_ones while the WGMMA still reads it
    o_i = opaque(gl.arange(0, 64, gl.SliceLayout(1, left)))[:, None]
    o_j = gl.arange(0, 64, gl.SliceLayout(0, left))[None, :]
    if LATER:
        b_ones = gl.where(o_j >= o_i, 1.0, 0.0).to(s_high.dtype)
    else:
        b_ones = gl.where(o_j <= o_i, 1.0, 0.0).to(s_high.dtype)
    fence_async_shared()
    barrier()
    b_sum = warpgroup_mma(b_ones, s_low, mma(b_ones, s_high, M), is_async=True)
    b_sum, b_ones = warpgroup_mma_wait(0, deps=[b_sum, b_ones])
    barrier()
    return b_sum
