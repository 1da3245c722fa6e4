"""Streams: the rows of a block are tokens of as many places, and the block after it has each row's next token.

A tap of a convolution then reads a whole block, and none is computed twice but where streams begin and end.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

from tokenmix_core import tuning
from tokenmix_core.chunking import cdiv, chunk_slots
from tokenmix_core.tile.hopper import LOG2_E, async_load, row_layout, sequence_span
from tokenmix_lte.ops.scorer.sizes import BLOCK_STREAMS, Sizes
from tokenmix_lte.ops.scorer.steps import Inputs

STREAMS = gl.constexpr(BLOCK_STREAMS)


@gluon.constexpr_function
def rows_of(columns):
    """Shared memory of rows of so many elements of 16 bits, as products read it."""
    return gl.NVMMASharedLayout(min(128, 2 * columns), 16)


@gluon.jit
def held(streams, layout: gl.constexpr):
    """What `locate_streams` says, in another layout."""
    i_row, there, end = streams
    return gl.convert_layout(i_row, layout), gl.convert_layout(there, layout), gl.convert_layout(end, layout)


@gluon.jit
def locate_streams(
    i_block, i_h, slots, tokens, T, N, H, begin, cu_seqlens, STEP: gl.constexpr, PACKED: gl.constexpr,
    WARPS: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Of a program's streams: the row of a stream's first own token in `[tokens, H]`, and from which on and before
    which tokens exist, counted from that one.

    A slot of `tokens` tokens, as `chunking.chunk_slots` counts them, is STEP streams of every STEP-th token.
    """
    BN: gl.constexpr = 64
    square: gl.constexpr = row_layout(BN, WARPS)
    i_s = i_block * STREAMS + gl.arange(0, STREAMS, gl.SliceLayout(1, square))
    i_c = i_s // STEP
    if PACKED:
        i_n = gl.zeros([STREAMS], gl.int32, gl.SliceLayout(1, square)) - 1
        for i in range(0, N, BN):
            o_n = i + gl.arange(0, BN, gl.SliceLayout(0, square))
            first = gl.load(cu_seqlens + o_n, mask=o_n < N, other=0).to(gl.int64) // tokens + o_n
            i_n += gl.sum(((first[None, :] <= i_c[:, None]) & (o_n < N)[None, :]).to(gl.int32), 1)
        i_row, length = sequence_span(i_n, T, cu_seqlens, PACKED)
        first = ((i_c - (i_row // tokens + i_n)) * tokens).to(gl.int32)
    else:
        chunks = gl.cdiv(T, tokens)
        i_n = i_c // chunks
        i_row, length = sequence_span(i_n, T, cu_seqlens, PACKED)
        first = (i_c - i_n * chunks) * tokens
    first += i_s % STEP
    there = -first
    if begin is not None:
        there += gl.load(begin + gl.minimum(i_n, N - 1)).to(gl.int32)
    end = gl.where(i_c < slots, length, 0) - first
    i_row = (i_row + first) * H + i_h
    return held((i_row, there, end), layout)


@gluon.jit
def exist(streams, o_t):
    """Whether each stream has a token so far from its first own one."""
    return (o_t >= streams[1]) & (o_t < streams[2])


@gluon.jit
def fetch_tokens(s_x, x, streams, o_t, H, C: gl.constexpr, WARPS: gl.constexpr):
    """Begin to copy C channels of each stream's token so far from its first own one; what does not exist becomes 0."""
    WIDTH: gl.constexpr = s_x.shape[1]
    o_c = gl.arange(0, WIDTH, gl.SliceLayout(0, row_layout(WIDTH, WARPS)))
    p_x = x + (streams[0] + o_t * H)[:, None] * C + o_c[None, :]
    async_load(s_x, p_x, mask=exist(streams, o_t)[:, None] & (o_c < C)[None, :])


@gluon.jit
def fetch_weights(w_s, w, i_h, H, WARPS: gl.constexpr):
    """Begin to copy a head's weights of three taps, `[3 n, rows, C]` of `[3, H, n rows, C]`."""
    ROWS: gl.constexpr = w_s.shape[1]
    C: gl.constexpr = w_s.shape[2]
    PARTS: gl.constexpr = w_s.shape[0] // 3
    o_i = gl.arange(0, ROWS, gl.SliceLayout(1, row_layout(C, WARPS)))
    o_o = gl.arange(0, C, gl.SliceLayout(0, row_layout(C, WARPS)))
    for i in gl.static_range(3 * PARTS):
        first = ((i // PARTS * H + i_h) * PARTS + i % PARTS) * ROWS
        async_load(w_s.index(i), w + (first + o_i[:, None]) * C + o_o[None, :])


@gluon.jit
def begin_convolution(x_s, w_s, i, acc):
    """Begin the sum over three taps of blocks i, i + 1 and i + 2 of a ring, each times the tap's weights."""
    PARTS: gl.constexpr = w_s.shape[0] // 3
    RING: gl.constexpr = x_s.shape[0] // PARTS
    for tap in gl.static_range(3):
        for part in gl.static_range(PARTS):
            s_x = x_s.index((i + tap) % RING * PARTS + part)
            acc = warpgroup_mma(s_x, w_s.index(tap * PARTS + part), acc, use_acc=tap + part > 0, is_async=True)
    return acc


@gluon.jit
def enlarged(threshold, DROPOUT: gl.constexpr):
    """By how much dropout enlarges what it leaves: sums of it are, as 16 bits would be rounded again."""
    scale = 1.0
    if DROPOUT:
        scale = 16777216.0 / (16777216 - threshold)
    return scale


@gluon.jit
def sigmoid(b_z):
    """1 / (1 + e^−z)."""
    return gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [1.0 + gl.exp2(b_z * -LOG2_E)], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def scramble(x):
    """As `tokens.scramble`; a sign is a bit as others are."""
    x ^= (x >> 16) & 0xFFFF
    x *= 0x7FEB352D
    x ^= (x >> 15) & 0x1FFFF
    # 0x846CA68B
    x *= -0x7B935975
    return x ^ ((x >> 16) & 0xFFFF)


@gluon.jit
def stay(seed, threshold, o_row, o_c, LAYER: gl.constexpr):
    """Whether dropout leaves elements of a layer's input, of rows and channels, as `reference.dropout_mask` says."""
    base = scramble(gl.load(seed).to(gl.int32) + LAYER * 0x2545F491)
    of_row = scramble(o_row.to(gl.int32) ^ base)
    of_channel = scramble(o_c.to(gl.int32) + base) | 1
    b_hash = of_row[:, None] * of_channel[None, :]
    # less 2³¹, numbers without a sign are in the order of those with one
    b_hash = (b_hash ^ ((b_hash >> 15) & 0x1FFFF)) * 0x2C1B3C6D + -0x80000000
    return b_hash >= (threshold << 8) + -0x80000000


@gluon.jit
def drop_tokens(s_x, seed, threshold, streams, o_t, H, i_channel, WARPS: gl.constexpr):
    """Dropout of a block of keys or values where it lies, whose sums will be enlarged."""
    C: gl.constexpr = s_x.shape[1]
    layout: gl.constexpr = row_layout(C, WARPS)
    o_c = i_channel + gl.arange(0, C, gl.SliceLayout(0, layout))
    b_stay = stay(seed, threshold, streams[0] + o_t * H, o_c, 0)
    b_x = s_x.load(layout)
    s_x.store(gl.where(b_stay, b_x, gl.zeros(b_x.shape, s_x.dtype, layout)))


@gluon.jit
def store_layer(
    s_x, b_z, seed, threshold, streams, o_t, H, LAYER: gl.constexpr, DROPOUT: gl.constexpr, layout: gl.constexpr
):
    """Store the SiLU of a layer as the next one's input: zeros where no token is, or dropout."""
    b_x = b_z * sigmoid(b_z)
    b_there = exist(streams, o_t)[:, None]
    if DROPOUT:
        o_c = gl.arange(0, s_x.shape[1], gl.SliceLayout(0, layout))
        b_there = b_there & stay(seed, threshold, streams[0] + o_t * H, o_c, LAYER)
    s_x.store(gl.where(b_there, b_x, 0.0).to(s_x.dtype))


def stream_blocks(x: Inputs, sizes: Sizes, programs: float) -> tuple[int, int, int]:
    """How a call is cut into streams for so many programs a multiprocessor: a slot's tokens, slots, a head's programs.

    Streams have at least 8 tokens, as each begins with some that are another's.
    """
    B, T, H, _ = x.k.shape
    *_, step = sizes.taps
    of_head = max(1, int(programs * tuning.multiprocessors(x.k.device)) // H)
    tokens = max(8, min(cdiv(B * T, of_head * BLOCK_STREAMS), cdiv(T, step))) * step
    slots = chunk_slots(B, T, tokens, x.cu_seqlens)
    return tokens, slots, cdiv(slots * step, BLOCK_STREAMS)
