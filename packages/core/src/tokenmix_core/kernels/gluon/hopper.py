"""Common parts of Gluon kernels for Hopper: layouts, asynchronous copies, mbarrier pipelines, packed sequences.

In Gluon, a part of Triton, a kernel names its layouts and orders its asynchronous copies and WGMMAs itself.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mbarrier

from tokenmix_core.kernels.pdl import gdc_launch_and_wait as gdc_launch_and_wait
from tokenmix_core.kernels.triton.decay import LOG2_E as LOG2_E
from tokenmix_core.kernels.triton.decay import LOWEST as LOWEST
from tokenmix_core.kernels.triton.decay import causal_decay as causal_decay
from tokenmix_core.kernels.triton.varlen import first_chunk as first_chunk
from tokenmix_core.kernels.triton.varlen import locate_slot as locate_slot
from tokenmix_core.kernels.triton.varlen import sequence_span as sequence_span

# versions of Triton name these functions differently: take the newer name if it exists, else the older one
async_load = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
barrier = getattr(gl, "barrier", None) or gl.thread_barrier
_REINTERPRETS = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))


@gluon.constexpr_function
def row_layout(columns, warps):
    """Return the layout of a copy to or from shared memory: rows of 16 to 256 16-bit elements; 16 bytes per thread."""
    return gl.BlockedLayout([1, 8], [256 // columns, columns // 8], [warps, 1], [1, 0])


@gluon.constexpr_function
def mma_layout(columns, warps):
    """Return the accumulator layout of an MMA in which each warp holds 16 rows."""
    return gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, columns, 16])


@gluon.constexpr_function
def mma_layout_split_n(columns, warps):
    """Return the accumulator layout of an MMA of 64 rows whose columns are split over the warpgroups."""
    return gl.NVMMADistributedLayout([3, 0], [4, warps // 4], [16, columns * 4 // warps, 16])


@gluon.constexpr_function
def state_layout(rows, columns, warps):
    """Return the layout of a float32 state: a warp holds `rows` / `warps` rows; a thread loads 16 bytes at a time."""
    lanes = columns // 4
    return gl.BlockedLayout([rows * lanes // (32 * warps), 4], [32 // lanes, lanes], [warps, 1], [1, 0])


@gluon.constexpr_function
def tiled_shape(shape, part):
    """Return `[count, *part]`, where `count` is how many tiles of shape `part` fit into a buffer of shape `shape`."""
    count = 1
    for size in shape:
        count *= size
    for size in part:
        count //= size
    return [count, *part]


@gluon.jit
def reinterpret(s_x, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr, i=0):
    """View the smem buffer `s_x` as tiles of `shape` and `dtype`, a dtype of equal width; return the i-th tile."""
    # view whole buffers, because Triton 3.8 cannot reinterpret parts of one
    whole: gl.constexpr = tiled_shape(s_x.shape, shape)
    if _REINTERPRETS:
        s_y = s_x.reinterpret(dtype, whole, layout).index(i)
    else:
        s_y = s_x._reinterpret(dtype, whole, layout).index(i)
    return s_y


@gluon.jit
def async_copy_tile(s_x, p_x, first, rows, stride, valid=None, THREAD_RELATIVE: gl.constexpr = False):
    """Start an async copy of rows `first`, `first` + 1, … of `p_x` to the tile `s_x`; rows from `rows` on become 0.

    If the flag `valid` is given, `rows` is ignored: all rows are copied if `valid` is true, else all become 0.
    `THREAD_RELATIVE` computes a thread's addresses relative to its first row: fewer registers, faster in some kernels.
    """
    layout: gl.constexpr = row_layout(s_x.shape[1], gl.num_warps())
    o_t = gl.arange(0, s_x.shape[0], gl.SliceLayout(1, layout))
    o_d = gl.arange(0, s_x.shape[1], gl.SliceLayout(0, layout))
    p_x += first.to(gl.int64) * stride
    if valid is not None:
        m_t = (o_t >= 0) & valid
    elif THREAD_RELATIVE:
        m_t = o_t < rows - first
    else:
        m_t = first + o_t < rows
    if THREAD_RELATIVE:
        # number of rows that the program copies if each thread executes one copy instruction
        step: gl.constexpr = 256 // s_x.shape[1] * gl.num_warps()
        p_x += o_t[:, None] % step * stride + o_d[None, :]
        p_x += o_t[:, None] // step * step * stride
    else:
        p_x = p_x + o_t[:, None] * stride + o_d[None, :]
    async_load(s_x, p_x, mask=m_t[:, None])


@gluon.jit
def wait_async_copies(PENDING: gl.constexpr):
    """Wait until at most the `PENDING` newest commit groups are in flight; all warps and WGMMAs then see the data."""
    async_copy.wait_group(PENDING)
    fence_async_shared()
    barrier()


@gluon.jit
def opaque(o_x):
    """Return the indices through an opaque `mov`, so that LICM cannot hoist offsets derived from them out of a loop."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [o_x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def opaque_tile(s_x):
    """Return the smem tile at an opaque address, so that the compiler computes its WGMMA descriptor again for each MMA.

    A descriptor computed just before its MMA lives in uniform registers. A descriptor hoisted out of a loop occupies a
    thread's registers, spills, and must be moved to uniform registers before each MMA.
    """
    shape: gl.constexpr = s_x.shape
    layout: gl.constexpr = s_x.layout
    return reinterpret(s_x, s_x.dtype, shape, layout, opaque(0))


@gluon.jit
def async_copy_rows(s_x, p_rows, stride, rows, WARPS: gl.constexpr, OPAQUE: gl.constexpr = False):
    """Start an async copy of rows that lie `stride` elements apart, to the tile `s_x`; rows from `rows` on become 0.

    With `OPAQUE` every copy computes its offsets again: this takes more instructions, but no registers between copies.
    """
    layout: gl.constexpr = row_layout(s_x.shape[1], WARPS)
    o_t = gl.arange(0, s_x.shape[0], gl.SliceLayout(1, layout))
    o_t = (opaque(o_t) if OPAQUE else o_t)[:, None]
    o_d = gl.arange(0, s_x.shape[1], gl.SliceLayout(0, layout))[None, :]
    async_load(s_x, p_rows + o_t * stride + o_d, mask=o_t < rows)


@gluon.jit
def store_rows(p_rows, s_x, stride, rows, WARPS: gl.constexpr, OPAQUE: gl.constexpr = False):
    """Store the first `rows` rows of an smem tile, `stride` elements apart; `OPAQUE`: see `async_copy_rows`."""
    layout: gl.constexpr = row_layout(s_x.shape[1], WARPS)
    o_t = gl.arange(0, s_x.shape[0], gl.SliceLayout(1, layout))
    o_t = (opaque(o_t) if OPAQUE else o_t)[:, None]
    o_d = gl.arange(0, s_x.shape[1], gl.SliceLayout(0, layout))[None, :]
    gl.store(p_rows + o_t * stride + o_d, s_x.load(layout), mask=o_t < rows)


@gluon.jit
def widen(b_x):
    """Convert a 16-bit tile to float32; bfloat16 takes one instruction per element."""
    if b_x.dtype == gl.bfloat16:
        b_x = gl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=r,=r,r", [b_x],
            dtype=gl.float32, is_pure=True, pack=2,
        )  # fmt: skip
    return b_x.to(gl.float32)


@gluon.jit
def split_hi_lo(b_x, dtype: gl.constexpr):
    """Return a float32 tile rounded to the 16-bit `dtype`, and the rounding error, also in `dtype`."""
    if dtype == gl.bfloat16:
        # this instruction converts two elements at once
        b_hi = gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [b_x], dtype=gl.bfloat16, is_pure=True, pack=2
        )
    else:
        b_hi = b_x.to(dtype)
    return b_hi, (b_x - widen(b_hi)).to(dtype)


@gluon.jit
def scale_tile(b_x, b_y):
    """Return X ⊙ Y in X's 16-bit dtype for float32 Y; for bfloat16, X is multiplied by Y's high and low parts."""
    if b_x.dtype == gl.bfloat16:
        b_hi, b_lo = split_hi_lo(b_y, gl.bfloat16)
        b_x = gl.inline_asm_elementwise(
            "{.reg .b32 t; mul.rn.bf16x2 t, $1, $3; fma.rn.bf16x2 $0, $1, $2, t;}", "=r,r,r,r", [b_x, b_hi, b_lo],
            dtype=gl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        b_x = (b_x.to(gl.float32) * b_y).to(b_x.dtype)
    return b_x


@gluon.jit
def log2(x):
    """Return an approximate base-2 logarithm of floats that are not subnormal, in one instruction."""
    return gl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def pointer_or(p_x, p_other):
    """Return the pointer `p_x` or, if it is None, `p_other` as a placeholder, which kernels never dereference."""
    if p_x is None:
        return p_other
    else:
        return p_x


@gluon.jit
def add(x, y):
    """Return x + y, the combine function of `gl.associative_scan`."""
    return x + y


@gluon.jit
def locate_chunk(i_c, T, C, N, cu_seqlens, PACKED: gl.constexpr, WARPS: gl.constexpr):
    """Find the chunk of C tokens with index `i_c` in the batch; results as in `kernels.triton.varlen.locate_chunk`."""
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
def allocate_mbarriers(count: gl.constexpr, arrivals: gl.constexpr):
    """Allocate and initialise `count` mbarriers whose phases complete after `arrivals` arrivals."""
    barriers = gl.allocate_shared_memory(gl.int64, [count, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(count):
        mbarrier.init(barriers.index(i), arrivals)
    return barriers


@gluon.jit
def parity(i, NUM_STAGES: gl.constexpr):
    """Return the phase bit that a consumer of the i-th tile of a pipeline waits for on its stage's full barrier.

    A producer waits for the opposite bit on the empty barrier, so that its first `NUM_STAGES` waits return at once.
    """
    return (i // NUM_STAGES) & 1


@gluon.jit
def empty_parity(i, NUM_STAGES: gl.constexpr):
    """Return the phase bit that the producer of the i-th tile of a pipeline waits for on its stage's empty barrier."""
    return (i // NUM_STAGES + 1) & 1


@gluon.jit
def wait_full(full, i, count, NUM_STAGES: gl.constexpr):
    """Wait until the i-th of a pipeline's `count` tiles has been copied; for i ≥ `count`, wait for the last tile."""
    i = gl.minimum(i, count - 1)
    mbarrier.wait(full.index(i % NUM_STAGES), parity(i, NUM_STAGES))
