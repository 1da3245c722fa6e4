"""Common parts of Gluon kernels for Hopper: layouts, copies into shared memory beside the matrix units, borders.

Gluon is the part of Triton that names layouts and leaves the order of copies and products to the kernel.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mbarrier

# names of newer versions of Triton, or of older ones
async_load = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
barrier = getattr(gl, "barrier", None) or gl.thread_barrier
_REINTERPRETS = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))

# as in `tile.decay`
LOG2_E = gl.constexpr(1.4426950408889634)
LOWEST = gl.constexpr(-160.0)


@gluon.constexpr_function
def row_layout(columns, warps):
    """Rows of 16 to 128 elements of 16 bits, 16 bytes a thread."""
    return gl.BlockedLayout([1, 8], [256 // columns, columns // 8], [warps, 1], [1, 0])


@gluon.constexpr_function
def product_layout(columns, warps):
    """A product of 16 rows a warp."""
    return gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, columns, 16])


@gluon.constexpr_function
def group_layout(columns, warps):
    """A product of 64 rows, whose columns are shared out among groups of four warps."""
    return gl.NVMMADistributedLayout([3, 0], [4, warps // 4], [16, columns * 4 // warps, 16])


@gluon.constexpr_function
def state_layout(rows, columns, warps):
    """Rows of a float32 state, 16 bytes a thread; each warp holds `rows` / `warps` of them."""
    lanes = columns // 4
    return gl.BlockedLayout([rows * lanes // (32 * warps), 4], [32 // lanes, lanes], [warps, 1], [1, 0])


@gluon.constexpr_function
def tiles_of(shape, part):
    """The shape of as many smaller tiles as there is room for in one of `shape`."""
    count = 1
    for size in shape:
        count *= size
    for size in part:
        count //= size
    return [count, *part]


@gluon.jit
def reinterpret(s_x, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr, i=0):
    """The i-th tile of this shape in the shared memory of another tile, whose elements are as wide."""
    # Triton 3.8 takes all of it, or nothing
    room: gl.constexpr = tiles_of(s_x.shape, shape)
    if _REINTERPRETS:
        s_y = s_x.reinterpret(dtype, room, layout).index(i)
    else:
        s_y = s_x._reinterpret(dtype, room, layout).index(i)
    return s_y


@gluon.jit
def begin_copy(s_x, p_x, first, rows, stride: gl.constexpr, wanted=None, FROM_FIRST: gl.constexpr = False):
    """Begin to copy rows `first` … of a matrix into a shared tile; rows from `rows` on become 0.

    Where it is told whether the tile is `wanted`, all of its rows exist, and become 0 if it is not. With `FROM_FIRST` a
    thread reckons places from its first one, which takes fewer registers; some kernels are faster so, some are not.
    """
    layout: gl.constexpr = row_layout(s_x.shape[1], gl.num_warps())
    o_t = gl.arange(0, s_x.shape[0], gl.SliceLayout(1, layout))
    o_d = gl.arange(0, s_x.shape[1], gl.SliceLayout(0, layout))
    p_x += first.to(gl.int64) * stride
    if wanted is not None:
        m_t = (o_t >= 0) & wanted
    elif FROM_FIRST:
        m_t = o_t < rows - first
    else:
        m_t = first + o_t < rows
    if FROM_FIRST:
        # rows that all threads copy at once
        step: gl.constexpr = 256 // s_x.shape[1] * gl.num_warps()
        p_x += o_t[:, None] % step * stride + o_d[None, :]
        p_x += o_t[:, None] // step * step * stride
    else:
        p_x = p_x + o_t[:, None] * stride + o_d[None, :]
    async_load(s_x, p_x, mask=m_t[:, None])


@gluon.jit
def await_copies(NEWER: gl.constexpr):
    """Wait until all groups of copies but the `NEWER` newest are there, for every warp and for the matrix units."""
    async_copy.wait_group(NEWER)
    fence_async_shared()
    barrier()


@gluon.jit
def anew(o_x):
    """The same indices, unknown to the compiler: it keeps no offsets made of them before a loop."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [o_x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def placed_anew(s_x):
    """The same tile, at a place unknown to the compiler: it keeps no descriptors made of it for later products.

    Made for one product they take uniform registers alone. Kept they take a thread's registers, which are spilled, and
    are brought from there to uniform ones before each product that they serve.
    """
    shape: gl.constexpr = s_x.shape
    layout: gl.constexpr = s_x.layout
    return reinterpret(s_x, s_x.dtype, shape, layout, anew(0))


@gluon.jit
def fetch_rows(s_x, p_rows, stride, rows, WARPS: gl.constexpr, ANEW: gl.constexpr = False):
    """Begin to copy rows that lie `stride` elements apart; rows from `rows` on become zero.

    Offsets made `ANEW` take instructions where they are needed, and no registers elsewhere.
    """
    layout: gl.constexpr = row_layout(s_x.shape[1], WARPS)
    o_t = gl.arange(0, s_x.shape[0], gl.SliceLayout(1, layout))
    o_t = (anew(o_t) if ANEW else o_t)[:, None]
    o_d = gl.arange(0, s_x.shape[1], gl.SliceLayout(0, layout))[None, :]
    async_load(s_x, p_rows + o_t * stride + o_d, mask=o_t < rows)


@gluon.jit
def store_rows(p_rows, s_x, stride, rows, WARPS: gl.constexpr, ANEW: gl.constexpr = False):
    """Store a tile from shared memory as rows that lie `stride` elements apart, up to row `rows`; `ANEW` as above."""
    layout: gl.constexpr = row_layout(s_x.shape[1], WARPS)
    o_t = gl.arange(0, s_x.shape[0], gl.SliceLayout(1, layout))
    o_t = (anew(o_t) if ANEW else o_t)[:, None]
    o_d = gl.arange(0, s_x.shape[1], gl.SliceLayout(0, layout))[None, :]
    gl.store(p_rows + o_t * stride + o_d, s_x.load(layout), mask=o_t < rows)


@gluon.jit
def widen(b_x):
    """A 16-bit tile in float32: two numbers in two instructions."""
    if b_x.dtype == gl.bfloat16:
        b_x = gl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=r,=r,r", [b_x],
            dtype=gl.float32, is_pure=True, pack=2,
        )  # fmt: skip
    return b_x.to(gl.float32)


@gluon.jit
def parts(b_x, dtype: gl.constexpr):
    """A float32 tile as the sum of two 16-bit ones."""
    if dtype == gl.bfloat16:
        # two numbers an instruction
        b_hi = gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [b_x], dtype=gl.bfloat16, is_pure=True, pack=2
        )
    else:
        b_hi = b_x.to(dtype)
    return b_hi, (b_x - widen(b_hi)).to(dtype)


@gluon.jit
def scale_tile(b_x, b_y):
    """X ⊙ Y for a 16-bit tile and factors in float32, which are taken in two parts: two numbers in two instructions."""
    if b_x.dtype == gl.bfloat16:
        b_hi, b_lo = parts(b_y, gl.bfloat16)
        b_x = gl.inline_asm_elementwise(
            "{.reg .b32 t; mul.rn.bf16x2 t, $1, $3; fma.rn.bf16x2 $0, $1, $2, t;}", "=r,r,r,r", [b_x, b_hi, b_lo],
            dtype=gl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        b_x = (b_x.to(gl.float32) * b_y).to(b_x.dtype)
    return b_x


@gluon.jit
def log2(x):
    """The logarithm of a normal number, in one instruction."""
    return gl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def causal_decay(b_row, b_col, o_row, o_col):
    """`exp2(b_row − b_col)` where the row's token is at or after the column's, else 0."""
    return gl.exp2(gl.where(o_row[:, None] >= o_col[None, :], b_row[:, None] - b_col[None, :], float("-inf")))


@gluon.jit
def either(p_x, p_other):
    """x; where it is absent another pointer, which nothing is read from or written to."""
    if p_x is None:
        return p_other
    else:
        return p_x


@gluon.jit
def add(x, y):
    """The sum, for `gl.associative_scan`."""
    return x + y


@gluon.jit
def sequence_span(i_n, T, cu_seqlens, PACKED: gl.constexpr):
    """As `tile.sequences.sequence_span`: a sequence's first row and length."""
    if PACKED:
        begin = gl.load(cu_seqlens + i_n).to(gl.int64)
        length = (gl.load(cu_seqlens + i_n + 1).to(gl.int64) - begin).to(gl.int32)
    else:
        begin = i_n.to(gl.int64) * T
        length = T
    return begin, length


@gluon.jit
def first_chunk(i_n, begin, T, C, PACKED: gl.constexpr):
    """As `tile.sequences.first_chunk`: the slot of a sequence's first chunk of C tokens."""
    if PACKED:
        slot = begin // C + i_n
    else:
        slot = i_n.to(gl.int64) * gl.cdiv(T, C)
    return slot


@gluon.jit
def locate_chunk(i_c, T, C, N, cu_seqlens, PACKED: gl.constexpr, WARPS: gl.constexpr):
    """As `tile.sequences.locate_chunk`: a slot's sequence, its first row and length, and the chunk's first token."""
    if PACKED:
        BN: gl.constexpr = 256
        sequences = 0
        for i in range(0, N, BN):
            o_n = i + gl.arange(0, BN, gl.BlockedLayout([2], [32], [WARPS], [0]))
            slots = gl.load(cu_seqlens + o_n, mask=o_n < N, other=0).to(gl.int64) // C + o_n
            sequences += gl.sum(((slots <= i_c) & (o_n < N)).to(gl.int32), 0)
        i_n = sequences - 1
        begin, length = sequence_span(i_n, T, cu_seqlens, PACKED)
        first = ((i_c - first_chunk(i_n, begin, T, C, PACKED)) * C).to(gl.int32)
    else:
        chunks = gl.cdiv(T, C)
        i_n = i_c // chunks
        begin, length = sequence_span(i_n, T, cu_seqlens, PACKED)
        first = (i_c - i_n * chunks) * C
    return i_n, begin, length, first


@gluon.jit
def let_next_begin():
    """From here on the next kernel may begin where there is room, if it is launched with `launch_pdl`."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def await_kernels_before():
    """Wait until the kernel before has ended: what is launched with `launch_pdl` reads and writes nothing earlier."""
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def take_turn(EARLY: gl.constexpr):
    """As `early.take_turn`."""
    if EARLY:
        let_next_begin()
        await_kernels_before()


@gluon.jit
def allocate_barriers(count: gl.constexpr, arrivals: gl.constexpr):
    """Barriers whose phases end when so many have arrived."""
    barriers = gl.allocate_shared_memory(gl.int64, [count, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(count):
        mbarrier.init(barriers.index(i), arrivals)
    return barriers


@gluon.jit
def await_tile(full, i, count, places: gl.constexpr):
    """Wait until the i-th tile of a ring is there, or the last one."""
    i = gl.minimum(i, count - 1)
    mbarrier.wait(full.index(i % places), (i // places) & 1)
