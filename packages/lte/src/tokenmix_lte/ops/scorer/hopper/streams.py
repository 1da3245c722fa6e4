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
from tokenmix_lte.ops.scorer.sizes import BLOCK_STREAMS, DROPPED, Sizes
from tokenmix_lte.ops.scorer.types import Inputs

STREAMS = gl.constexpr(BLOCK_STREAMS)
DROPPED_Z = gl.constexpr(DROPPED)
# one element per stream: the row in `[tokens, H]` of the stream's first own token; start and end of its sequence,
# counted from this token
Streams = namedtuple("Streams", "row start end")
# number of tokens in a row, number of sequences, first existing token of each row, boundaries of packed sequences
Sequences = namedtuple("Sequences", "T N begin cu_seqlens")
# dropout of a layer's input: the hash of seed and layer, the hash of each channel's pair, and the threshold
Dropout = namedtuple("Dropout", "base pairs threshold")


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
    """Return the mask of the streams in which token o_t exists, counted from each stream's first own token."""
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
        scale = 32768.0 / (32768 - threshold)
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
def fold(x):
    """Return `tokens.fold`: the lower half of int64 xor its upper half."""
    return (x ^ (x >> 32)).to(gl.int32)


@gluon.jit
def hash_channels(seed, threshold, o_c, LAYER: gl.constexpr):
    """Return the `Dropout` of channels of a layer's input, before a loop over tokens."""
    base = hash32(gl.load(seed).to(gl.int32) + (LAYER + 1) * 0x2545F491)
    # both channels of a pair have one hash, which the compiler computes once
    return Dropout(base, hash32((o_c >> 1).to(gl.int32) + base) | 1, threshold)


@gluon.jit
def dropout_mask(dropout, o_row):
    """Return `reference.dropout_mask` for rows of a layer's input, as int16: −1, or 0 if dropped."""
    # the signed value of 0x9E3779B1
    row_hash = fold((o_row.to(gl.int32) ^ dropout.base).to(gl.int64) * -0x61C8864F)
    # multiply int32 by `mul.wide`: for a product of int64 that are converted before the loop, the compiler would also
    # multiply the upper halves
    b_wide = gl.inline_asm_elementwise(
        "mul.wide.s32 $0, $1, $2;", "=l,r,r", [row_hash[:, None], dropout.pairs[None, :]],
        dtype=gl.int64, is_pure=True, pack=1,
    )  # fmt: skip
    b_hash = fold(b_wide) & 0x7FFF7FFF
    # 15 bits plus 2¹⁵ − threshold have bit 15 if the 15 bits are at least the threshold; both halves in one sum
    b_hash += (32768 - dropout.threshold) * 0x10001
    # copy the sign of each half to its 16 bits
    return gl.inline_asm_elementwise(
        "prmt.b32 $0, $1, 0, 0xBB99;", "=r,r,r", [b_hash], dtype=gl.int16, is_pure=True, pack=2
    )


@gluon.jit
def where_kept(b_mask, b_x, b_other):
    """Return 16-bit elements of x, or of other if `dropout_mask` is 0; one instruction for two elements."""
    return gl.inline_asm_elementwise(
        "lop3.b32 $0, $1, $2, $3, 0xCA;", "=r,r,r,r", [b_mask, b_x, b_other], dtype=b_x.dtype, is_pure=True, pack=2
    )


@gluon.jit
def drop_tokens(s_x, dropout, streams, o_t, H, WARPS: gl.constexpr):
    """Set the dropped elements of a block of keys or values in shared memory to 0; return the mask.

    Float32 sums are scaled later.
    """
    C: gl.constexpr = s_x.shape[1]
    layout: gl.constexpr = row_layout(C, WARPS)
    b_mask = dropout_mask(dropout, streams.row + o_t * H)
    b_x = s_x.load(layout)
    s_x.store(where_kept(b_mask, b_x, gl.zeros(b_x.shape, s_x.dtype, layout)))
    return b_mask


@gluon.jit
def store_layer(s_x, b_z, dropout, streams, o_t, H, layout: gl.constexpr):
    """Store SiLU(z) of a layer as input of the next layer; missing tokens and dropped elements are 0.

    Return z in the dtype of the inputs, in which dropped elements are `sizes.DROPPED`.
    """
    b_x = gl.where(exists(streams, o_t)[:, None], b_z * sigmoid(b_z), 0.0).to(s_x.dtype)
    b_z = b_z.to(s_x.dtype)
    if dropout is not None:
        b_mask = dropout_mask(dropout, streams.row + o_t * H)
        b_x = where_kept(b_mask, b_x, gl.zeros(b_x.shape, s_x.dtype, layout))
        b_z = where_kept(b_mask, b_z, gl.full(b_z.shape, DROPPED_Z, s_x.dtype, layout))
    s_x.store(b_x)
    return b_z


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
