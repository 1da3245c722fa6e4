"""Locate segments, and find the chunk at which the scan of a segment's state, or of its gradient, must start."""

from collections import namedtuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tokenmix_core.kernels.gluon.hopper import add, locate_chunk, locate_slot

# log2 of the largest decay that counts as negligible: far below the rounding error of 16-bit operands
NEGLIGIBLE = gl.constexpr(-32.0)
# value that replaces a chunk's log2 decay if its write factor is outside [0, 1], since decays then do not bound the
# state; it exceeds the magnitude of any sum of log2 decays, so that no sum that includes it is negligible
UNBOUNDED = gl.constexpr(1e30)


# i_s, i_hv: indices of the segment and the value head; i_n, begin, length: index, first row and length of the sequence;
# first: position of the segment's first token in the sequence
Segment = namedtuple("Segment", "i_s i_hv i_n begin length first")
# writes: write factors (None if all are 1); slot: index of the sequence's first chunk in the batch; i_hv: value head;
# HV: number of value heads
Factors = namedtuple("Factors", "writes slot i_hv HV")
# first, end: indices of a segment's first chunk and one past its last; count: number of chunks of the sequence
Chunks = namedtuple("Chunks", "first end count")


@gluon.jit
def locate_state(i_n, i_hv, slots, fresh, stride_state, K: gl.constexpr, V: gl.constexpr, PARTS: gl.constexpr):
    """Return the offset in a pool of a head's state, and whether a sequence reads and whether it writes its slot.

    PARTS heads of V columns share the rows of a head of the pool.
    """
    slot, held = locate_slot(i_n, slots, fresh)
    return slot * stride_state + (i_hv // PARTS) * (K * V * PARTS) + (i_hv % PARTS) * V, held, slot >= 0


@gluon.jit
def locate_segment(
    i_sh, order, T, N, HV, segment, cu_seqlens, PACKED: gl.constexpr, ORDERED: gl.constexpr, WARPS: gl.constexpr
):  # fmt: skip
    """Return the `Segment` of a program; with ORDERED, programs take segments in the order of `order`."""
    i_s, i_hv = i_sh // HV, i_sh % HV
    if ORDERED:
        i_s = gl.load(order + i_s)
    i_n, begin, length, first = locate_chunk(i_s, T, segment, N, cu_seqlens, PACKED, WARPS)
    return Segment(i_s, i_hv, i_n, begin, length, first)


@gluon.jit
def negligible_chunks(p_gates, segment, WARPS: gl.constexpr):
    """Return how many chunks at a segment's start have a negligible effect on the state that leaves the segment.

    The keys must have norm 1; `../forward.py` has the same function in Triton, with the reason.
    """
    o_c = gl.arange(0, 128, gl.BlockedLayout([1], [32], [WARPS], [0])) + gl.maximum(segment // 64 - 128, 0)
    b_b = gl.load(p_gates + (o_c * 64 + 63) * 4, mask=o_c < segment // 64, other=0.0)
    b_left = gl.associative_scan(b_b, 0, add, reverse=True)
    return gl.max(gl.where((b_left < NEGLIGIBLE) & (o_c < segment // 64), o_c, 0), 0)


@gluon.jit
def bounded(skipped, p_w, stride, chunks, WARPS: gl.constexpr):
    """Return `skipped` if the write factors of all `chunks` are in [0, 1], so that decays bound the state; else 0."""
    beyond = 0
    for i in range(0, chunks, 128):
        o_c = i + gl.arange(0, 128, gl.BlockedLayout([1], [32], [WARPS], [0]))
        b_w = gl.load(p_w + o_c.to(gl.int64) * stride, mask=o_c < chunks, other=0.0)
        beyond += gl.sum(((b_w < 0.0) | (b_w > 1.0)).to(gl.int32), 0)
    return gl.where(beyond > 0, 0, skipped)


@gluon.jit
def scan_start(gates, factors, span, tokens, segment, L2NORM: gl.constexpr, WARPS: gl.constexpr):
    """Return the token at which a segment's scan starts: the preceding segment's first chunk that is not negligible.

    The result is the segment's own first token, and the scan starts from the entering state, if no chunk of the
    preceding segment is negligible, if one of its write factors is outside [0, 1], or without L2NORM.
    """
    writes, slot, i_hv, HV = factors.writes, factors.slot, factors.i_hv, factors.HV
    begin, first = span.begin, span.first
    begun = first
    if L2NORM and first > 0:
        before = gates + (i_hv.to(gl.int64) * tokens + begin + first - segment) * 4
        skipped = negligible_chunks(before, segment, WARPS)
        if writes is not None:
            p_w = writes + (slot + (first - segment) // 64).to(gl.int64) * HV + i_hv
            skipped = bounded(skipped, p_w, HV, segment // 64, WARPS)
        if skipped > 0:
            begun = first - segment + skipped * 64
    return begun


@gluon.jit
def decay_of(p_gates, p_w, stride, chunk, end, length):
    """Return log2 of the decays of chunks: 0 from chunk `end` on, UNBOUNDED if the write factor is outside [0, 1].

    `p_w` points at the write factors of a sequence; it is None if all are 1.
    """
    b_last = gl.load(p_gates + gl.minimum(chunk * 64 + 63, length - 1) * 4, mask=chunk < end, other=0.0)
    if p_w is not None:
        b_w = gl.load(p_w + chunk.to(gl.int64) * stride, mask=chunk < end, other=0.0)
        b_last = gl.where((b_w < 0.0) | (b_w > 1.0), UNBOUNDED, b_last)
    return b_last


@gluon.jit
def reverse_scan_end(p_gates, p_w, stride, end, chunks, length, BOUNDED: gl.constexpr):
    """Return one past the last chunk with a noticeable effect on the gradient of the state that enters chunk `end`.

    Only chunks before the index `chunks` are considered. BOUNDED: with keys of norm 1 and β ≤ 2 no update lengthens a
    column of the state, so decays bound contributions. Without BOUNDED all of these chunks contribute, and the result
    is `chunks`.
    """
    chunk = end
    if BOUNDED:
        decay = 0.0
        while (chunk < chunks) & (decay > NEGLIGIBLE):
            decay = decay + decay_of(p_gates, p_w, stride, chunk, chunks, length)
            chunk = chunk + 1
    else:
        chunk = chunks
    return chunk


@gluon.jit
def decay_over(p_gates, p_w, stride, first, end, length, layout: gl.constexpr):
    """Return log2 of the decay over chunks `first` to `end` − 1 of a sequence, as a sum of `decay_of`."""
    decay = 0.0
    for i in range(first, end, 128):
        o_c = i + gl.arange(0, 128, layout)
        decay = decay + gl.sum(decay_of(p_gates, p_w, stride, o_c, end, length), 0)
    return decay


@gluon.jit
def reverse_scan_start(
    p_gates, factors, span, segment, length, layout: gl.constexpr, L2NORM: gl.constexpr, LOCAL: gl.constexpr,
    CARRIED: gl.constexpr,
):  # fmt: skip
    """Return one past the chunk at which a segment's reverse scan starts; `span.first` means that no scan is needed.

    LOCAL: the scan computes the local gradient of the segment's entering state, from a zero gradient after the segment,
    or from the final state's gradient in the last segment. No scan is needed for the first segment of a sequence, nor
    if the decays of this segment and of the preceding one are both negligible. CARRIED: the scan starts at the
    segment's end, from the gradient of the next segment's entering state, unless the decay of the next segment is
    negligible. In all other cases it starts at the last chunk, of this or a later segment, whose effect is not
    negligible.
    """
    writes, slot, i_hv, HV = factors.writes, factors.slot, factors.i_hv, factors.HV
    first, end, chunks = span.first, span.end, span.count
    p_w = writes
    if writes is not None:
        p_w += slot.to(gl.int64) * HV + i_hv
    started = end
    if LOCAL:
        started = first
        if first > 0:
            # a margin of 1 below the limit, because other kernels sum the decays in another order and so round
            # differently
            earlier = decay_over(p_gates, p_w, HV, first - segment // 64, first, length, layout)
            here = decay_over(p_gates, p_w, HV, first, end, length, layout)
            if (here > NEGLIGIBLE - 1) | (earlier > NEGLIGIBLE - 1):
                started = reverse_scan_end(p_gates, p_w, HV, first, end, length, L2NORM)
    elif CARRIED:
        later = gl.minimum(end + segment // 64, chunks)
        if decay_over(p_gates, p_w, HV, end, later, length, layout) <= NEGLIGIBLE:
            started = reverse_scan_end(p_gates, p_w, HV, end, chunks, length, L2NORM)
    else:
        started = reverse_scan_end(p_gates, p_w, HV, end, chunks, length, L2NORM)
    return started
