"""Streams: a slot's tokens are divided into STEP streams of every STEP-th token; a block has one token of each stream.

A slot is a run of consecutive tokens of a sequence. The next block has the next token of each stream, so that a tap of
a convolution reads a whole block, without shifting rows. Only tokens at the ends of streams are computed twice.

    tokens of a row, STEP = 2:     0   1   2   3   4   5  | 6   7   8  …        a slot of 6 tokens = 2 streams of 3
    stream:                        0   1   0   1   0   1  | 2   3   2  …
    block b (64 rows):             row r = token b of stream r, from global memory to stage b mod NUM_STAGES
    a tap reads:                   block b + tap
"""

from __future__ import annotations

from collections import namedtuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

from tokenmix_core.chunking import cdiv, chunk_slots
from tokenmix_core.kernels import sm_count
from tokenmix_core.kernels.gluon import LOG2_E, async_load, row_layout, sequence_span
from tokenmix_lte.ops.scorer.sizes import BLOCK_STREAMS, Sizes
from tokenmix_lte.ops.scorer.types import Inputs

STREAMS = gl.constexpr(BLOCK_STREAMS)
# one element per stream: the row in `[tokens, H]` of the stream's first own token; start and end of its sequence,
# counted from this token
Streams = namedtuple("Streams", "row start end")
# number of tokens in a row, number of sequences, first existing token of each row, boundaries of packed sequences
Sequences = namedtuple("Sequences", "T N begin cu_seqlens")


@gluon.constexpr_function
def smem_layout(columns):
    """Return the shared-memory layout for WGMMA operands whose rows have `columns` 16-bit elements."""
    return gl.NVMMASharedLayout(min(128, 2 * columns), 16)


@gluon.jit
def convert_streams(streams, layout: gl.constexpr):
    """Convert `streams`, which `locate_streams` has returned, to another register layout."""
    return Streams(
        gl.convert_layout(streams.row, layout),
        gl.convert_layout(streams.start, layout),
        gl.convert_layout(streams.end, layout),
    )


@gluon.jit
def locate_streams(
    i_block, i_h, slots, tokens, sequences, H, STEP: gl.constexpr, WARPS: gl.constexpr, layout: gl.constexpr
):
    """Return the `Streams` of program `i_block`; `sequences` is a `Sequences`.

    A slot of `tokens` tokens, as `chunking.chunk_slots` counts them, has STEP streams, each with every STEP-th token.
    """
    BN: gl.constexpr = 64
    square: gl.constexpr = row_layout(BN, WARPS)
    i_s = i_block * STREAMS + gl.arange(0, STREAMS, gl.SliceLayout(1, square))
    i_c = i_s // STEP
    PACKED: gl.constexpr = sequences.cu_seqlens is not None
    N, T = sequences.N, sequences.T
    if PACKED:
        i_n = gl.zeros([STREAMS], gl.int32, gl.SliceLayout(1, square)) - 1
        for i in range(0, N, BN):
            o_n = i + gl.arange(0, BN, gl.SliceLayout(0, square))
            first = gl.load(sequences.cu_seqlens + o_n, mask=o_n < N, other=0).to(gl.int64) // tokens + o_n
            i_n += gl.sum(((first[None, :] <= i_c[:, None]) & (o_n < N)[None, :]).to(gl.int32), 1)
        i_row, length = sequence_span(i_n, T, sequences.cu_seqlens, PACKED)
        first = ((i_c - (i_row // tokens + i_n)) * tokens).to(gl.int32)
    else:
        chunks = gl.cdiv(T, tokens)
        i_n = i_c // chunks
        i_row, length = sequence_span(i_n, T, sequences.cu_seqlens, PACKED)
        first = (i_c - i_n * chunks) * tokens
    first += i_s % STEP
    start = -first
    if sequences.begin is not None:
        start += gl.load(sequences.begin + gl.minimum(i_n, N - 1)).to(gl.int32)
    end = gl.where(i_c < slots, length, 0) - first
    i_row = (i_row + first) * H + i_h
    return convert_streams(Streams(i_row, start, end), layout)


@gluon.jit
def exists(streams, o_t):
    """Return the mask of the streams in which a token o_t after the first own token exists."""
    return (o_t >= streams.start) & (o_t < streams.end)


@gluon.jit
def copy_tokens(s_x, x, streams, o_t, H, C: gl.constexpr, WARPS: gl.constexpr):
    """Start async copies of C channels of each stream's token o_t after its first own one; missing tokens become 0."""
    WIDTH: gl.constexpr = s_x.shape[1]
    o_c = gl.arange(0, WIDTH, gl.SliceLayout(0, row_layout(WIDTH, WARPS)))
    p_x = x + (streams.row + o_t * H)[:, None] * C + o_c[None, :]
    async_load(s_x, p_x, mask=exists(streams, o_t)[:, None] & (o_c < C)[None, :])


@gluon.jit
def copy_weights(s_w, w, i_h, H, WARPS: gl.constexpr):
    """Start async copies of one head's weights for three taps, from `[3, H, n · rows, C]` to `[3 n, rows, C]`."""
    ROWS: gl.constexpr = s_w.shape[1]
    C: gl.constexpr = s_w.shape[2]
    PARTS: gl.constexpr = s_w.shape[0] // 3
    o_i = gl.arange(0, ROWS, gl.SliceLayout(1, row_layout(C, WARPS)))
    o_o = gl.arange(0, C, gl.SliceLayout(0, row_layout(C, WARPS)))
    for i in gl.static_range(3 * PARTS):
        first = ((i // PARTS * H + i_h) * PARTS + i % PARTS) * ROWS
        async_load(s_w.index(i), w + (first + o_i[:, None]) * C + o_o[None, :])


@gluon.jit
def issue_convolution(s_x, s_w, i, acc):
    """Start the WGMMAs of a convolution: the sum over three taps of block i + tap times the tap's weights."""
    PARTS: gl.constexpr = s_w.shape[0] // 3
    NUM_STAGES: gl.constexpr = s_x.shape[0] // PARTS
    for tap in gl.static_range(3):
        for part in gl.static_range(PARTS):
            s_block = s_x.index((i + tap) % NUM_STAGES * PARTS + part)
            acc = warpgroup_mma(s_block, s_w.index(tap * PARTS + part), acc, use_acc=tap + part > 0, is_async=True)
    return acc


@gluon.jit
def dropout_scale(threshold, DROPOUT: gl.constexpr):
    """Return dropout's factor 1 / (1 − p), for the float32 sums: scaling 16-bit inputs would round them twice."""
    scale = 1.0
    if DROPOUT:
        scale = 16777216.0 / (16777216 - threshold)
    return scale


@gluon.jit
def sigmoid(b_z):
    """Return 1 / (1 + e^−z)."""
    return gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [1.0 + gl.exp2(b_z * -LOG2_E)], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def hash32(x):
    """Return `tokens.hash32` of an int32; as int32 shifts copy the sign bit, masks remove these copies."""
    x ^= (x >> 16) & 0xFFFF
    x *= 0x7FEB352D
    x ^= (x >> 15) & 0x1FFFF
    # 0x846CA68B as a signed integer
    x *= -0x7B935975
    return x ^ ((x >> 16) & 0xFFFF)


@gluon.jit
def dropout_mask(seed, threshold, o_row, o_c, LAYER: gl.constexpr):
    """Return the same as `reference.dropout_mask`, for rows and channels of a layer's input."""
    base = hash32(gl.load(seed).to(gl.int32) + LAYER * 0x2545F491)
    row_hash = hash32(o_row.to(gl.int32) ^ base)
    channel_hash = hash32(o_c.to(gl.int32) + base) | 1
    b_hash = row_hash[:, None] * channel_hash[None, :]
    # subtract 2³¹: signed comparison then orders the values as unsigned comparison did before
    b_hash = (b_hash ^ ((b_hash >> 15) & 0x1FFFF)) * 0x2C1B3C6D + -0x80000000
    return b_hash >= (threshold << 8) + -0x80000000


@gluon.jit
def drop_tokens(s_x, seed, threshold, streams, o_t, H, i_channel, WARPS: gl.constexpr):
    """Set the dropped elements of a block of keys or values in shared memory to 0; float32 sums are scaled later."""
    C: gl.constexpr = s_x.shape[1]
    layout: gl.constexpr = row_layout(C, WARPS)
    o_c = i_channel + gl.arange(0, C, gl.SliceLayout(0, layout))
    b_mask = dropout_mask(seed, threshold, streams.row + o_t * H, o_c, 0)
    b_x = s_x.load(layout)
    s_x.store(gl.where(b_mask, b_x, gl.zeros(b_x.shape, s_x.dtype, layout)))


@gluon.jit
def store_layer(
    s_x, b_z, seed, threshold, streams, o_t, H, LAYER: gl.constexpr, DROPOUT: gl.constexpr, layout: gl.constexpr
):
    """Store SiLU(z) of a layer as input of the next layer; missing tokens and dropped elements are 0."""
    b_x = b_z * sigmoid(b_z)
    b_exists = exists(streams, o_t)[:, None]
    if DROPOUT:
        o_c = gl.arange(0, s_x.shape[1], gl.SliceLayout(0, layout))
        b_exists = b_exists & dropout_mask(seed, threshold, streams.row + o_t * H, o_c, LAYER)
    s_x.store(gl.where(b_exists, b_x, 0.0).to(s_x.dtype))


def stream_blocks(x: Inputs, sizes: Sizes, programs: float) -> tuple[int, int, int]:
    """Divide a call into streams for `programs` programs per SM; return tokens per slot, slots, and programs per head.

    A stream has at least 8 tokens, because for each stream, tokens of its neighbours are computed a second time.
    """
    B, T, H, _ = x.k.shape
    step = sizes.taps.step
    programs_per_head = max(1, int(programs * sm_count(x.k.device)) // H)
    tokens = max(8, min(cdiv(B * T, programs_per_head * BLOCK_STREAMS), cdiv(T, step))) * step
    slots = chunk_slots(B, T, tokens, x.cu_seqlens)
    return tokens, slots, cdiv(slots * step, BLOCK_STREAMS)
