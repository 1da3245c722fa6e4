"""Device functions: chunk indices, tile loads and stores, and gates as two factors that cannot overflow.

Inside a chunk the weight of token j in a slot at token t is `exp2(G_t − G_j) · enter_j`, with G the cumulative log2
gates and `enter_j` = 1 − the gate of j. An MMA needs this weight as (row factor) · (column factor), both relative to
the token before a block that holds t and j. A chunk is weak if no slot decays by more than 80 bits in the chunk: the
block is the whole chunk, and both factors lie within 2^±80. A strong chunk is halved until each block satisfies this
bound. Tokens t and j of different blocks lie in opposite halves of a larger block; relative to the boundary between the
halves, both factors are ≤ 1.
"""

from collections import namedtuple

import triton
import triton.language as tl

from tokenmix_core.kernels import LOG2_E, locate_slot

# arguments without specialisation: they depend on the sequence length, so each new length would compile again
SIZES = ["N", "NH", "chunks", "entries", "extra", "lead", "segments"]
LN_2 = tl.constexpr(0.6931471805599453)
# log2 of the bound on the factors of a block, which lie within 2^±80
LARGEST_FACTOR = tl.constexpr(80.0)

# sizes of a call as in `Layout`, and pointers: `splits` has the halvings of each chunk, `start` the first valid keys;
# in a prefill in slots also fields of `Pool`, and the distance between slots of `length`
Chunks = namedtuple(
    "Chunks",
    "splits start cu_seqlens T N H before window chunks entries extra lead slots fresh length stride_length",
    defaults=(0, 0, None, None, None, None),
)
# compile-time sizes and options of a kernel; assigning one to a variable would turn it into a tensor, so never do
Constants = namedtuple(
    "Constants", "M SLOTS BM K V BT GROUP HEADS STRONG FACTOR DOT BN OWN_SLOT_KEYS SHORT", defaults=(None, False, False)
)
# a chunk of keys. first: its first key; keys: number of the sequence's keys; oldest: first valid key; length: number of
# the sequence's queries; count: number of halvings of the chunk, −1 if it does not exist; entry: index of its state;
# begin_k, begin_q: offsets of the sequence's first key and query
KeyChunk = namedtuple("KeyChunk", "first keys oldest length count entry begin_k begin_q")
# a chunk of queries, at which the tokens of key chunk i_t enter the slots (none if i_t < 0); else as `KeyChunk`. slot,
# seen: the sequence's slot in the pool, and its number of earlier tokens; i_h: the key head
QueryChunk = namedtuple("QueryChunk", "i_t keys oldest length count entry begin_q begin_k slot seen i_h")


@triton.jit
def locate_chunk(i_c, at, extra, BT: tl.constexpr):
    """Return `(i_n, i_t, begin, length)` of program index `i_c`: sequence, chunk of the sequence, the sequence's first
    query (int64) and its number of queries.

    The chunks of a sequence cover `extra` tokens more than it has. In a packed batch the chunks of sequence n begin at
    index `⌊b / BT⌋ + n`, with b tokens before the sequence. No two sequences share an index, so the kernel needs no
    table; programs at unused indices return.
    """
    if at.cu_seqlens is not None:
        BN: tl.constexpr = 128
        sequences = 0
        for i in range(0, at.N, BN):
            o_n = i + tl.arange(0, BN)
            m_n = o_n < at.N
            slots = (tl.load(at.cu_seqlens + o_n, mask=m_n, other=0).to(tl.int64) + o_n * extra) // BT + o_n
            sequences += tl.sum(((slots <= i_c) & m_n).to(tl.int32), 0)
        i_n = sequences - 1
        begin = tl.load(at.cu_seqlens + i_n).to(tl.int64)
        length = (tl.load(at.cu_seqlens + i_n + 1) - begin).to(tl.int32)
        i_t = i_c - ((begin + i_n * extra) // BT + i_n).to(tl.int32)
    else:
        i_n = i_c // at.chunks
        begin = i_n.to(tl.int64) * at.T
        length = at.T
        i_t = i_c - i_n * at.chunks
    return i_n, i_t, begin, length


@triton.jit
def token_rows(first, keys, oldest, length, before, window, BT: tl.constexpr):
    """Return indices and masks for the keys of a chunk and the queries that lie `window` tokens after these keys: the
    keys' indices; masks of visible keys, of existing keys and of keys that enter the slots; the queries' indices and
    the mask of existing queries. For query r, keys ≤ r have left the window and are in the slots; later ones have not.
    """
    o_r = tl.arange(0, BT)
    o_j = first + o_r
    m_j = (o_j >= oldest) & (o_j < keys)
    o_q = first + window - before + o_r
    return o_j, m_j, o_j < keys, m_j & (o_j < keys - window), o_q, (o_q >= 0) & (o_q < length)


@triton.jit
def sequence_span(i_n, T, cu_seqlens):
    """Return the first query (int64, over all rows) and the number of queries of sequence `i_n`."""
    if cu_seqlens is not None:
        begin = tl.load(cu_seqlens + i_n).to(tl.int64)
        length = (tl.load(cu_seqlens + i_n + 1) - begin).to(tl.int32)
    else:
        begin = i_n.to(tl.int64) * T
        length = T
    return begin, length


@triton.jit
def first_entry(i_n, begin_k, entries, cu_seqlens, BT: tl.constexpr):
    """Return the index of the first chunk state of sequence `i_n`, which has one before each chunk and a final one."""
    if cu_seqlens is not None:
        entry = begin_k // BT + 2 * i_n
    else:
        entry = i_n.to(tl.int64) * entries
    return entry


@triton.jit
def earlier_tokens(i_n, at):
    """Return `(slot, seen, oldest)` of sequence `i_n`: its slot in the pool, its number of earlier tokens, and the
    index of its first valid key. Without a pool, the first two are 0."""
    slot, seen, oldest = 0, 0, 0
    if at.slots is not None:
        slot, held = locate_slot(i_n, at.slots, at.fresh)
        seen = tl.where(held, tl.load(at.length + tl.maximum(slot, 0) * at.stride_length), 0)
        oldest = tl.maximum(at.before - seen, 0)
    elif at.start is not None:
        oldest = tl.load(at.start + i_n)
    return slot, seen, oldest


@triton.jit
def begin_of_keys(begin, i_n, at):
    """Return the index of the first key of sequence `i_n`, whose first query is `begin`.

    The carried window's keys lie before the sequence's own ones, or in a pool: the result then is the index that the
    first of these would have.
    """
    if at.slots is not None:
        begin = begin - at.before
    else:
        begin = begin + i_n.to(tl.int64) * at.before
    return begin


@triton.jit
def ring_rows(p, o_t, stride, p_ring, seen, before):
    """Return pointers to rows `o_t` of a sequence's keys, values or gates, of which the first `before` rows are in a
    ring buffer: token j, of the `seen` earlier ones, has row j mod `before` there."""
    in_ring = p_ring + ((seen + o_t) % before).to(tl.int64) * stride
    # Triton 3.9 does not see that rows from both tensors begin at multiples of 16 bytes
    return tl.multiple_of(tl.where(o_t < before, in_ring, p + o_t.to(tl.int64) * stride), 16)


@triton.jit
def load_tokens(
    p, o_t, m_t, stride, ring, stride_ring, o_ring, slot, seen, before, first, BD: tl.constexpr
):  # fmt: skip
    """Load columns `first … first + BD − 1` of rows `o_t` of a sequence's keys or values; other rows than `m_t` are 0.

    With `ring`, a pool's ring buffers, the first `before` rows are in that of the sequence's slot, from element
    `o_ring` on.
    """
    o_d = first + tl.arange(0, BD)
    if ring is None:
        p_x = p + o_t.to(tl.int64)[:, None] * stride + o_d[None, :]
    else:
        p_ring = ring + (slot * stride_ring + o_ring)
        p_x = ring_rows(p, o_t, stride, p_ring, seen, before)[:, None] + o_d[None, :]
    return tl.load(p_x, mask=m_t[:, None], other=0.0)


@triton.jit
def load_rows(p, o_t, m_t, stride, D: tl.constexpr):
    """Load rows `o_t` of a matrix with D columns; rows outside the mask `m_t` are 0."""
    return tl.load(p + o_t.to(tl.int64)[:, None] * stride + tl.arange(0, D)[None, :], mask=m_t[:, None], other=0.0)


@triton.jit
def store_rows(p, b_x, o_t, m_t, stride, D: tl.constexpr):
    """Store rows `o_t` of a matrix with D columns."""
    p = p + o_t.to(tl.int64)[:, None] * stride + tl.arange(0, D)[None, :]
    tl.store(p, b_x.to(p.dtype.element_ty), mask=m_t[:, None])


@triton.jit
def load_keys(p, ring, stride_ring, o_t, m_t, chunk, at, D: tl.constexpr):
    """Load rows `o_t` of the keys or values of a query chunk's sequence; other rows than `m_t` are 0."""
    p += chunk.begin_k * D
    o_ring = chunk.i_h * D
    return load_tokens(
        p, o_t, m_t, at.H * D, ring, stride_ring, o_ring, chunk.slot, chunk.seen, at.before, 0, D
    )  # fmt: skip


@triton.jit
def load_pairs(t, chunk, o_q, m_q, o_j, m_j, at, c):
    """Return tiles of a chunk: its queries for the window and for the slots, and the keys that enter the slots."""
    HQ = at.H * c.GROUP
    b_q = load_rows(t.q + chunk.begin_q * c.K, o_q, m_q, HQ * c.K, c.K)
    if c.OWN_SLOT_KEYS:
        b_qs = load_rows(t.q_slots + chunk.begin_q * c.K, o_q, m_q, HQ * c.K, c.K)
        b_ks = load_keys(t.k_slots, t.ring_k_slots, t.stride_ring_k_slots, o_j, m_j, chunk, at, c.K)
    else:
        b_qs = b_q
        b_ks = load_keys(t.k, t.ring_k, t.stride_ring_k, o_j, m_j, chunk, at, c.K)
    return b_q, b_qs, b_ks


@triton.jit
def load_gates(p_f, o_t, m_t, stride, slots, M: tl.constexpr):
    """Load rows `o_t` of log-gates as float32. Rows outside the mask and columns ≥ `slots` get log-gate 0, so that no
    token enters there."""
    o_m = tl.arange(0, M)
    p_f = p_f + o_t.to(tl.int64)[:, None] * stride + o_m[None, :]
    return tl.load(p_f, mask=m_t[:, None] & (o_m < slots)[None, :], other=0.0).to(tl.float32)


@triton.jit
def load_ring_gates(
    p_f, o_t, m_t, stride, slots, ring, stride_ring, o_ring, slot, seen, before, M: tl.constexpr
):  # fmt: skip
    """Load log-gates as `load_gates` does; with `ring`, the first `before` rows are in a ring buffer, as in
    `load_tokens`."""
    if ring is None:
        b_f = load_gates(p_f, o_t, m_t, stride, slots, M)
    else:
        o_m = tl.arange(0, M)
        p_ring = ring + (slot * stride_ring + o_ring)
        p_f = ring_rows(p_f, o_t, stride, p_ring, seen, before)[:, None] + o_m[None, :]
        b_f = tl.load(p_f, mask=m_t[:, None] & (o_m < slots)[None, :], other=0.0).to(tl.float32)
    return b_f


@triton.jit
def load_columns(p, M: tl.constexpr, R: tl.constexpr, BM: tl.constexpr):
    """Load a tile `[R, BM]` of a matrix with M columns; columns ≥ M are 0."""
    o_m = tl.arange(0, BM)[None, :]
    p += tl.arange(0, R)[:, None] * M + o_m
    if BM > M:
        return tl.load(p, mask=o_m < M, other=0.0)
    else:
        return tl.load(p)


@triton.jit
def store_columns(p, b_x, M: tl.constexpr, R: tl.constexpr, BM: tl.constexpr):
    """Store a tile `[R, BM]` of a matrix with M columns."""
    o_m = tl.arange(0, BM)[None, :]
    p += tl.arange(0, R)[:, None] * M + o_m
    if BM > M:
        tl.store(p, b_x.to(p.dtype.element_ty), mask=o_m < M)
    else:
        tl.store(p, b_x.to(p.dtype.element_ty))


@triton.jit
def load_by_slot(p, o_t, m_t, heads, M: tl.constexpr, BM: tl.constexpr):
    """Load BM slots of rows `o_t` of one head of a tensor `[.., heads, M]`; 0 outside the mask and in columns ≥ M."""
    o_m = tl.arange(0, BM)[None, :]
    p += o_t.to(tl.int64)[:, None] * (heads * M) + o_m
    mask = m_t[:, None]
    if BM > M:
        mask = mask & (o_m < M)
    return tl.load(p, mask=mask, other=0.0)


@triton.jit
def store_by_slot(p, b_x, o_t, m_t, heads, M: tl.constexpr, BM: tl.constexpr):
    """Store BM slots of rows `o_t` of one head of a tensor `[.., heads, M]`."""
    o_m = tl.arange(0, BM)[None, :]
    p += o_t.to(tl.int64)[:, None] * (heads * M) + o_m
    mask = m_t[:, None]
    if BM > M:
        mask = mask & (o_m < M)
    tl.store(p, b_x.to(p.dtype.element_ty), mask=mask)


@triton.jit
def load_factors(p, exists, other, M: tl.constexpr, BT: tl.constexpr, BM: tl.constexpr):
    """Load a chunk's factors `[BT, BM]`; columns from M on, and all unless `exists`, are filled with `other`."""
    o_t, o_m = tl.arange(0, BT)[:, None], tl.arange(0, BM)[None, :]
    mask = o_t < tl.where(exists, BT, 0)
    if BM > M:
        mask = mask & (o_m < M)
    return tl.load(p + o_t * M + o_m, mask=mask, other=other)


@triton.jit
def enter_weight(b_f):
    """Return 1 − exp(f) for f ≤ 0; near 0 by a power series, because the difference would lose precision."""
    b_small = -b_f * (1.0 + b_f * (0.5 + b_f * (1 / 6 + b_f * (1 / 24 + b_f * (1 / 120)))))
    return tl.where(b_f > -0.1, b_small, 1.0 - tl.exp2(b_f * LOG2_E))


@triton.jit
def as_factor(b_x, FACTOR: tl.constexpr, DOT: tl.constexpr):
    """Round x to the MMA's operand dtype; round to TF32 here, to nearest, because the MMA would truncate."""
    if DOT == "tf32" and tl.float32 == FACTOR:
        return ((b_x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    else:
        return b_x.to(FACTOR)


@triton.jit
def log2_gates(b_f, DOT: tl.constexpr):
    """Return log2 of the gates, clamped to −28 (float32) or −14: smaller gates vanish in the MMA's rounding error."""
    if DOT == "ieee":
        return tl.maximum(b_f * LOG2_E, -28.0)
    else:
        return tl.maximum(b_f * LOG2_E, -14.0)


@triton.jit
def sums_of_rows(b_m, b_x, DOT: tl.constexpr):
    """Return the matmul of `b_m` (elements −1, 0 or 1) and x; unless DOT is "ieee", x is split into two bf16 parts."""
    if DOT == "ieee":
        return tl.dot(b_m, b_x, input_precision=DOT)
    else:
        b_high = b_x.to(tl.bfloat16)
        b_low = (b_x - b_high.to(tl.float32)).to(tl.bfloat16)
        b_m = b_m.to(tl.bfloat16)
        return tl.dot(b_m, b_low, tl.dot(b_m, b_high))


@triton.jit
def gates_between(b_log, o_from, o_to, BT: tl.constexpr, DOT: tl.constexpr):
    """Return `G_to − G_from` `[BT, M]` for one pair (from, to) per row: the sum of log-gates over tokens from + 1 … to,
    or, if to < from, minus the sum over to + 1 … from. Index −1 is the chunk's start."""
    o_s, o_0 = tl.arange(0, BT)[None, :], tl.zeros([BT], dtype=tl.int32)
    b_to = tl.where(o_s <= (o_0 + o_to)[:, None], 1.0, 0.0)
    b_from = tl.where(o_s <= (o_0 + o_from)[:, None], 1.0, 0.0)
    return sums_of_rows(b_to - b_from, b_log, DOT)


@triton.jit
def block_pairs(o_t, o_j, size):
    """Return the mask of the pairs j ≤ t that lie in the same block of `size` tokens."""
    return (o_j <= o_t) & ((o_j & -size) == (o_t & -size))


@triton.jit
def opposite_pairs(o_t, o_j, half):
    """Return the mask of the pairs with j in the left and t in the right half of a block of 2 · `half` tokens."""
    return ((o_j & -(2 * half)) == (o_t & -(2 * half))) & ((o_t & half) > (o_j & half))


@triton.jit
def block_to_boundary(b_log, size, half, BT: tl.constexpr, DOT: tl.constexpr):
    """Return for each row the decay (≤ 1) between the start of its block of `size` tokens and the middle of its block
    of 2 · `half` tokens."""
    o_r = tl.arange(0, BT)
    return tl.exp2(-tl.abs(gates_between(b_log, (o_r & -(2 * half)) + half - 1, (o_r & -size) - 1, BT, DOT)))


@triton.jit
def block_to_start(b_log, size, BT: tl.constexpr, DOT: tl.constexpr):
    """Return for each row the decay (≤ 1) from the chunk's start to the start of its block of `size` tokens."""
    return tl.exp2(gates_between(b_log, -1, (tl.arange(0, BT) & -size) - 1, BT, DOT))


@triton.jit
def halvings(b_log, least, BT: tl.constexpr, DOT: tl.constexpr):
    """Return the number of halvings, at least `least`, after which no slot decays by more than 80 bits inside a block.

    The clamp on the gates already bounds the decay in blocks of four tokens (two in float32), so smaller ones are not
    needed.
    """
    o_r = tl.arange(0, BT)
    lowest = tl.min(tl.sum(b_log, 0), 0)
    size = BT
    count = 0
    while ((lowest < -LARGEST_FACTOR) | (count < least)) & (size > (2 if DOT == "ieee" else 4)):
        count += 1
        size //= 2
        lowest = tl.min(tl.min(gates_between(b_log, (o_r & -size) - 1, o_r, BT, DOT), 1), 0)
    return count


@triton.jit
def add_end_gradients(
    b_dx, p_weight, p_ds, BM: tl.constexpr, M: tl.constexpr, D: tl.constexpr, BT: tl.constexpr, DOT: tl.constexpr
):
    """Return `b_dx` plus the gradient that a chunk's tokens receive through BM slots at the chunk's end."""
    b_in = load_columns(p_weight, M, BT, BM)
    return tl.dot(b_in, tl.trans(load_columns(p_ds, M, D, BM)), b_dx, input_precision=DOT)


@triton.jit
def pair_weights(b_y, p_col, p_f, count, o_j, m_e, stride, slots, c):
    """Return `Σ_m col_m(j) y_m(t)` `[token j, query t]` over BM slots.

    The result is 0 for tokens j > t, which the window contains.
    """
    b_col = load_columns(p_col, c.M, c.BT, c.BM)
    o_r = tl.arange(0, c.BT)
    r_j, r_t = o_r[:, None], o_r[None, :]
    size = c.BT >> count
    b_b = tl.where(block_pairs(r_t, r_j, size), tl.dot(b_col, tl.trans(b_y), input_precision=c.DOT), 0.0)
    if c.STRONG:
        b_log = log2_gates(load_gates(p_f, o_j, m_e, stride, slots, c.BM), c.DOT)
        for i in range(count):
            half = (c.BT // 2) >> i
            b_boundary = block_to_boundary(b_log, size, half, c.BT, c.DOT)
            b_h = tl.trans(as_factor(b_y * b_boundary, c.FACTOR, c.DOT))
            b_c = tl.dot(as_factor(b_col * b_boundary, c.FACTOR, c.DOT), b_h, input_precision=c.DOT)
            b_b += tl.where(opposite_pairs(r_t, r_j, half), b_c, 0.0)
    return b_b
