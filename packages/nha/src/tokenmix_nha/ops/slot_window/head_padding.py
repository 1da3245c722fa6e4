"""Loops of a program over the heads of a chunk: one head, or several in kernels for strong chunks.

Strong chunks are rare, so checking several heads in one program costs less than starting a program per head.
"""

import triton
import triton.language as tl

from tokenmix_nha.ops.slot_window.tile import first_entry, locate_chunk


@triton.jit
def locate_tokens(
    i_c, i_h, splits, start, cu_seqlens, T, N, H, before, window, chunks, entries,
    BT: tl.constexpr, GROUP: tl.constexpr, HAS_START: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Locate the i_c-th key chunk.

    Return the chunk's first key, the sequence's number of keys, its oldest valid key, its number of queries, how often
    the chunk is halved (−1 if the chunk does not exist), the index of its state, and the offsets of the first rows of
    keys and queries.
    """
    i_n, i_t, begin, length = locate_chunk(i_c, T, N, chunks, before, cu_seqlens, BT, PACKED)
    begin_k = begin + i_n.to(tl.int64) * before
    first, keys = i_t * BT, length + before
    entry = (first_entry(i_n, begin_k, entries, BT, PACKED) + i_t) * H + i_h
    count = tl.where(first < keys, 0, -1)
    if first < keys - window:
        count = tl.load(splits + entry)
    oldest = 0
    if HAS_START:
        oldest = tl.load(start + i_n)
    return first, keys, oldest, length, count, entry, begin_k * H + i_h, (begin * H + i_h) * GROUP


@triton.jit
def any_strong(
    i_c, i_h, splits, cu_seqlens, T, N, H, before, window, chunks, entries, BT: tl.constexpr, HEADS: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """True if the i_c-th key chunk is strong for any of HEADS heads from i_h on."""
    i_n, i_t, begin, length = locate_chunk(i_c, T, N, chunks, before, cu_seqlens, BT, PACKED)
    entry = (first_entry(i_n, begin + i_n.to(tl.int64) * before, entries, BT, PACKED) + i_t) * H
    o_h = i_h + tl.arange(0, HEADS)
    m_h = o_h < tl.where(i_t * BT < length + before - window, H, 0)
    return tl.max(tl.load(splits + entry + o_h, mask=m_h, other=0), 0) > 0


@triton.jit
def each_head_of_keys(
    body: tl.constexpr, arguments, splits, start, cu_seqlens, T, N, H, before, window, chunks, entries,
    BT: tl.constexpr, STRONG: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, HAS_START: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """Call `body(chunk, *arguments)` for each of HEADS heads whose key chunk is strong, or weak if not STRONG;
    `chunk` is the result of `locate_tokens`."""
    i_h = tl.program_id(1) * HEADS
    if STRONG:  # noqa: SIM102
        if not any_strong(
            tl.program_id(0), i_h, splits, cu_seqlens, T, N, H, before, window, chunks, entries, BT, HEADS, PACKED
        ):
            return
    # disable LICM: hoisting the indices that heads share would spill registers
    for i in tl.range(HEADS, disable_licm=True):
        if i_h + i < H:
            chunk = locate_tokens(
                tl.program_id(0), i_h + i, splits, start, cu_seqlens, T, N, H, before, window, chunks, entries, BT,
                GROUP, HAS_START, PACKED,
            )  # fmt: skip
            if (chunk[4] >= 0) & ((chunk[4] > 0) == STRONG):
                body(chunk, *arguments)


@triton.jit
def each_head_of_queries(
    body: tl.constexpr, arguments, splits, start, cu_seqlens, T, N, H, before, window, chunks, entries, extra, lead,
    BT: tl.constexpr, STRONG: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, HAS_START: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """Call `body(chunk, *arguments)` for each of HEADS query heads whose query chunk is strong, or weak if not STRONG.

    Query chunk `i_t` pairs with the i_t-th chunk of entering tokens. `chunk` holds `i_t`, how often it is halved, the
    index of its state, the oldest valid key, the offsets of the first rows of queries and keys, and the sequence's
    number of queries and of keys.
    """
    i_n, i_t, begin, length = locate_chunk(tl.program_id(0), T, N, chunks, extra, cu_seqlens, BT, PACKED)
    HQ = H * GROUP
    i_t -= lead
    begin_k = begin + i_n.to(tl.int64) * before
    keys = length + before
    entry = (first_entry(i_n, begin_k, entries, BT, PACKED) + tl.maximum(i_t, 0)) * H
    if i_t * BT + window - before >= length:
        return
    i_h = tl.program_id(1) * HEADS
    o_h = i_h + tl.arange(0, HEADS)
    b_count = tl.load(splits + entry + o_h // GROUP, mask=o_h < tl.where(i_t >= 0, HQ, 0), other=0)
    if STRONG & (tl.max(b_count, 0) == 0):
        return
    oldest = 0
    if HAS_START:
        oldest = tl.load(start + i_n)
    # disable LICM: hoisting the indices that heads share would spill registers
    for i in tl.range(HEADS, disable_licm=True):
        count = tl.sum(tl.where(o_h == i_h + i, b_count, 0), 0)
        if ((count > 0) == STRONG) & (i_h + i < HQ):
            i_k = (i_h + i) // GROUP
            chunk = i_t, count, entry + i_k, oldest, begin * HQ + i_h + i, begin_k * H + i_k, length, keys
            body(chunk, *arguments)
