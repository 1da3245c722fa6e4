"""Where segments lie, from how far before one its state is found, and from how far behind the last state's gradient."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tokenmix_core.kernels.gluon.hopper import add, locate_chunk

# base-2 logarithm of a decay that leaves nothing beside the rounding of 16-bit operands
FORGOTTEN = gl.constexpr(-32.0)
# stands for the decay of a chunk that decays do not bound: more than all others together take away
UNBOUNDED = gl.constexpr(1e30)


@gluon.jit
def locate_segment(
    i_sh, order, T, N, HV, segment, cu_seqlens, PACKED: gl.constexpr, ORDERED: gl.constexpr, WARPS: gl.constexpr
):  # fmt: skip
    """A program's segment and value head; the segment's sequence, its first row and length, and the first token in it.

    With ORDERED programs take segments by `order`.
    """
    i_s, i_hv = i_sh // HV, i_sh % HV
    if ORDERED:
        i_s = gl.load(order + i_s)
    i_n, begin, length, first = locate_chunk(i_s, T, segment, N, cu_seqlens, PACKED, WARPS)
    return i_s, i_hv, i_n, begin, length, first


@gluon.jit
def forgotten(p_gates, segment, WARPS: gl.constexpr):
    """As in `..forward`: how many of a segment's chunks need not be run for the state that leaves it; 0 if all do."""
    o_c = gl.arange(0, 128, gl.BlockedLayout([1], [32], [WARPS], [0])) + gl.maximum(segment // 64 - 128, 0)
    b_b = gl.load(p_gates + (o_c * 64 + 63) * 4, mask=o_c < segment // 64, other=0.0)
    b_left = gl.associative_scan(b_b, 0, add, reverse=True)
    return gl.max(gl.where((b_left < FORGOTTEN) & (o_c < segment // 64), o_c, 0), 0)


@gluon.jit
def bounded(skipped, p_w, stride, chunks, WARPS: gl.constexpr):
    """As in `..forward`: `skipped`, if the factors of writes of so many chunks lie between 0 and 1; else 0."""
    beyond = 0
    for i in range(0, chunks, 128):
        o_c = i + gl.arange(0, 128, gl.BlockedLayout([1], [32], [WARPS], [0]))
        b_w = gl.load(p_w + o_c.to(gl.int64) * stride, mask=o_c < chunks, other=0.0)
        beyond += gl.sum(((b_w < 0.0) | (b_w > 1.0)).to(gl.int32), 0)
    return gl.where(beyond > 0, 0, skipped)


@gluon.jit
def begun_at(
    gates, writes, slot, i_hv, HV, tokens, begin, first, segment, L2NORM: gl.constexpr, WARPS: gl.constexpr
):  # fmt: skip
    """The token that a segment's state is run from: of chunks before the segment, if they forget all before them.

    `first` itself means that the state entering the segment is not forgotten within the segment before. `slot` is that
    of the sequence's first chunk.
    """
    begun = first
    if L2NORM and first > 0:
        before = gates + (i_hv.to(gl.int64) * tokens + begin + first - segment) * 4
        skipped = forgotten(before, segment, WARPS)
        if writes is not None:
            p_w = writes + (slot + (first - segment) // 64).to(gl.int64) * HV + i_hv
            skipped = bounded(skipped, p_w, HV, segment // 64, WARPS)
        if skipped > 0:
            begun = first - segment + skipped * 64
    return begun


@gluon.jit
def decay_of(p_gates, p_w, stride, chunk, end, length):
    """Base-2 logarithms of the decays of chunks, 0 from `end` on; of a chunk whose factor is not in [0, 1] UNBOUNDED.

    The factors of a sequence's writes begin at `p_w`; None where all is written.
    """
    b_last = gl.load(p_gates + gl.minimum(chunk * 64 + 63, length - 1) * 4, mask=chunk < end, other=0.0)
    if p_w is not None:
        b_w = gl.load(p_w + chunk.to(gl.int64) * stride, mask=chunk < end, other=0.0)
        b_last = gl.where((b_w < 0.0) | (b_w > 1.0), UNBOUNDED, b_last)
    return b_last


@gluon.jit
def started_after(p_gates, p_w, stride, end, chunks, length, BOUNDED: gl.constexpr):
    """One past the last chunk that a segment ending before chunk `end` has to start from, `chunks` at most.

    What comes later is forgotten there: keys of norm 1 and β ≤ 2 lengthen no column of the state, so decays bound it.
    """
    chunk = end
    if BOUNDED:
        decay = 0.0
        while (chunk < chunks) & (decay > FORGOTTEN):
            decay = decay + decay_of(p_gates, p_w, stride, chunk, chunks, length)
            chunk = chunk + 1
    else:
        chunk = chunks
    return chunk


@gluon.jit
def decay_over(p_gates, p_w, stride, first, end, length, layout: gl.constexpr):
    """Base-2 logarithm of the decay over chunks `first` to `end`."""
    decay = 0.0
    for i in range(first, end, 128):
        o_c = i + gl.arange(0, 128, layout)
        decay = decay + gl.sum(decay_of(p_gates, p_w, stride, o_c, end, length), 0)
    return decay


@gluon.jit
def start_after(
    p_gates, writes, slot, i_hv, HV, first, end, chunks, segment, length, layout: gl.constexpr, L2NORM: gl.constexpr,
    LOCAL: gl.constexpr, CARRIED: gl.constexpr,
):  # fmt: skip
    """One past the chunk that a segment of chunks `first` to `end` starts from; `first` if it has nothing to do.

    LOCAL and CARRIED are those of the kernels: a gradient is passed back from a segment if it, or the one before it,
    remembers, but not from a sequence's first, which passes it to the initial state alone. `slot` is as in `begun_at`.
    """
    p_w = writes
    if writes is not None:
        p_w += slot.to(gl.int64) * HV + i_hv
    started = end
    if LOCAL:
        started = first
        if first > 0:
            # a little more than is going to be used, as sums in another order may differ
            earlier = decay_over(p_gates, p_w, HV, first - segment // 64, first, length, layout)
            here = decay_over(p_gates, p_w, HV, first, end, length, layout)
            if (here > FORGOTTEN - 1) | (earlier > FORGOTTEN - 1):
                started = started_after(p_gates, p_w, HV, first, end, length, L2NORM)
    elif CARRIED:
        later = gl.minimum(end + segment // 64, chunks)
        if decay_over(p_gates, p_w, HV, end, later, length, layout) <= FORGOTTEN:
            started = started_after(p_gates, p_w, HV, end, chunks, length, L2NORM)
    else:
        started = started_after(p_gates, p_w, HV, end, chunks, length, L2NORM)
    return started
