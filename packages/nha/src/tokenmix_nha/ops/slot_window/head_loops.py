"""The loop of a program over its heads: one head in kernels for weak chunks, several in kernels for strong chunks.

A chunk is strong if one of its slots decays by more than 80 bits. This is rare, so checking several heads in one
program costs less than starting a program for each head.
"""

import triton
import triton.language as tl

from tokenmix_nha.ops.slot_window.tile import (
    KeyChunk,
    QueryChunk,
    begin_of_keys,
    earlier_tokens,
    first_entry,
    locate_chunk,
)


@triton.jit
def _locate_keys(i_c, i_h, at, c):
    """Return the `KeyChunk` with index i_c for head i_h."""
    i_n, i_t, begin, length = locate_chunk(i_c, at, at.before, c.BT)
    begin_k = begin + i_n.to(tl.int64) * at.before
    first, keys = i_t * c.BT, length + at.before
    entry = (first_entry(i_n, begin_k, at.entries, at.cu_seqlens, c.BT) + i_t) * at.H + i_h
    count = tl.where(first < keys, 0, -1)
    if first < keys - at.window:
        count = tl.load(at.splits + entry)
    oldest = 0
    if at.start is not None:
        oldest = tl.load(at.start + i_n)
    return KeyChunk(
        first, keys, oldest, length, count, entry, begin_k * at.H + i_h, (begin * at.H + i_h) * c.GROUP
    )  # fmt: skip


@triton.jit
def _any_strong(i_c, i_h, at, c):
    """True if key chunk i_c is strong (a slot decays by over 80 bits) in any of the HEADS heads from i_h on."""
    i_n, i_t, begin, length = locate_chunk(i_c, at, at.before, c.BT)
    begin_k = begin + i_n.to(tl.int64) * at.before
    entry = (first_entry(i_n, begin_k, at.entries, at.cu_seqlens, c.BT) + i_t) * at.H
    o_h = i_h + tl.arange(0, c.HEADS)
    m_h = o_h < tl.where(i_t * c.BT < length + at.before - at.window, at.H, 0)
    return tl.max(tl.load(at.splits + entry + o_h, mask=m_h, other=0), 0) > 0


@triton.jit
def each_head_of_keys(body: tl.constexpr, x, at, c):
    """Call `body(KeyChunk, x, at, c)` for each of HEADS heads whose key chunk is strong if STRONG, else weak
    (`tile.py`)."""
    i_h = tl.program_id(1) * c.HEADS
    if c.STRONG:  # noqa: SIM102
        if not _any_strong(tl.program_id(0), i_h, at, c):
            return
    # disable loop-invariant code motion (LICM): indices that all heads share would be held, and registers would spill
    for i in tl.range(c.HEADS, disable_licm=True):
        if i_h + i < at.H:
            chunk = _locate_keys(tl.program_id(0), i_h + i, at, c)
            if (chunk.count >= 0) & ((chunk.count > 0) == c.STRONG):
                body(chunk, x, at, c)


@triton.jit
def each_head_of_queries(body: tl.constexpr, x, at, c):
    """Call `body(QueryChunk, x, at, c)` for each of HEADS query heads whose query chunk is strong if STRONG, else
    weak (`tile.py`)."""
    i_n, i_t, begin, length = locate_chunk(tl.program_id(0), at, at.extra, c.BT)
    HQ = at.H * c.GROUP
    i_t -= at.lead
    entry = begin + i_n.to(tl.int64) * at.before
    keys = length + at.before
    entry = (first_entry(i_n, entry, at.entries, at.cu_seqlens, c.BT) + tl.maximum(i_t, 0)) * at.H
    begin_k = begin_of_keys(begin, i_n, at)
    if i_t * c.BT + at.window - at.before >= length:
        return
    i_h = tl.program_id(1) * c.HEADS
    o_h = i_h + tl.arange(0, c.HEADS)
    b_count = tl.load(at.splits + entry + o_h // c.GROUP, mask=o_h < tl.where(i_t >= 0, HQ, 0), other=0)
    if c.STRONG & (tl.max(b_count, 0) == 0):
        return
    slot, seen, oldest = earlier_tokens(i_n, at)
    # disable loop-invariant code motion (LICM): indices that all heads share would be held, and registers would spill
    for i in tl.range(c.HEADS, disable_licm=True):
        count = tl.sum(tl.where(o_h == i_h + i, b_count, 0), 0)
        if ((count > 0) == c.STRONG) & (i_h + i < HQ):
            i_k = (i_h + i) // c.GROUP
            body(
                QueryChunk(
                    i_t, keys, oldest, length, count, entry + i_k, begin * HQ + i_h + i, begin_k * at.H + i_k, slot,
                    seen, i_k,
                ),
                x, at, c,
            )  # fmt: skip
