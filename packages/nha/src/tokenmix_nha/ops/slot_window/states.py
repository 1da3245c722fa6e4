"""Scans over chunks: one stores the slots before each chunk, the reverse scan the gradients of the slots after each.

One program scans some channels of one head, over a sequence or one of its segments. If there are few heads, sequences
are split into segments that run in parallel:

    LOCAL pass     segment 0 │ segment 1 │ …   each scan starts from zero; stores its final slots and total log2 decay
    carry          slots entering segment s+1 = local slots of s + decay of s · slots entering s
    second pass    segment 0 │ segment 1 │ …   each scan starts from its entering slots; stores the chunk states
"""

from collections import namedtuple
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmix_core.kernels import cached_launch, locate_slot
from tokenmix_nha.ops.slot_window import tile as tiles
from tokenmix_nha.ops.slot_window import tuning
from tokenmix_nha.ops.slot_window.tile import SIZES
from tokenmix_nha.ops.slot_window.types import (
    Backward,
    Gates,
    Inputs,
    Layout,
    Pool,
    Results,
    Saved,
    SlotGradients,
    Softmax,
    empty,
    of_pool,
)

# the slots of one head of a sequence: its row in `[N · H, SLOTS, D]` or, in a pool, in `[H, SLOTS, D]` of its slot;
# number of columns to read and to write; the slot's offset in the pool
_Head = namedtuple("_Head", "row readable writable SLOTS offset")
# number of channels that one program of the carry kernel scans
_CARRY_ROWS = 16


@triton.jit
def _load_columns(p, o_t, m_t, stride, first, BD: tl.constexpr):
    """Load columns `first … first + BD − 1` of the rows `o_t` of a matrix; rows masked by `m_t` are 0."""
    o_d = first + tl.arange(0, BD)
    return tl.load(p + o_t.to(tl.int64)[:, None] * stride + o_d[None, :], mask=m_t[:, None], other=0.0)


@triton.jit
def _load_slots(p, at, first, BD: tl.constexpr, D: tl.constexpr, M: tl.constexpr):
    """Load a tile `[BD, M]` of slots `[.., SLOTS, D]`; columns from SLOTS on are zero. `at`: a `_Head`."""
    o_d, o_m = first + tl.arange(0, BD), tl.arange(0, M)
    p = p + at.offset + at.row * at.SLOTS * D + o_m[None, :] * D + o_d[:, None]
    return tl.load(p, mask=(o_m < at.readable)[None, :], other=0.0).to(tl.float32)


@triton.jit
def _store_slots(p, b_s, at, first, BD: tl.constexpr, D: tl.constexpr, M: tl.constexpr):
    """Store a tile `[BD, M]` of slots `[.., SLOTS, D]`; columns from SLOTS on are left out. `at`: a `_Head`."""
    o_d, o_m = first + tl.arange(0, BD), tl.arange(0, M)
    p = p + at.offset + at.row * at.SLOTS * D + o_m[None, :] * D + o_d[:, None]
    tl.store(p, b_s, mask=(o_m < at.writable)[None, :])


@triton.jit
def _locate_head(i_nh, H, SLOTS, slots, fresh, stride):
    """Return the `_Head` of head and sequence `i_nh`."""
    row, readable, writable, offset = i_nh.to(tl.int64), SLOTS, SLOTS, 0
    if slots is not None:
        slot, held = locate_slot(i_nh // H, slots, fresh)
        row, offset = (i_nh % H).to(tl.int64), slot * stride
        readable, writable = tl.where(held, SLOTS, 0), tl.where(slot >= 0, SLOTS, 0)
    # Triton 3.6 cannot return None in a tuple
    return _Head(row, readable, writable, SLOTS, offset)


@triton.jit
def _tile_offsets(index, first, BD: tl.constexpr, M: tl.constexpr):
    """Return the offsets of rows `first … first + BD − 1` of the tile `[D, M]` that begins at element `index`."""
    return index + (first + tl.arange(0, BD))[:, None] * M + tl.arange(0, M)[None, :]


@cached_launch
@triton.jit(do_not_specialize=SIZES)
def slot_states_kernel(
    k, v, weight, end, initial_k, initial_v, cu_seqlens, local_k, local_v, local_g, states_k, states_v, final_k,
    final_v, ring_k, ring_v, length, stride_initial_k, stride_initial_v, stride_ring_k, stride_ring_v, stride_length,
    slots, fresh, T, NH, H, before, window, entries, segments, M: tl.constexpr, SLOTS, BM: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, ND: tl.constexpr, LOCAL: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Scan a segment: store the slots before every chunk and after the last one, as tiles `[entries, H, D, M]`.

    With LOCAL, start from zero, and store only the final slots and the total log2 decay. With `slots`, the initial and
    the final slots are a pool, and a sequence's first `before` tokens are in its ring buffer there.
    """
    i_s, i_nh = tl.program_id(0) // NH, tl.program_id(0) % NH
    i_d = tl.program_id(1)
    i_n, i_h = i_nh // H, i_nh % H
    BK: tl.constexpr = K // ND
    BV: tl.constexpr = V // ND
    o_r, o_m = tl.arange(0, BT), tl.arange(0, BM)

    at = tiles.Chunks(
        None, None, cu_seqlens, T, None, H, before, window, None, entries, 0, 0, slots, fresh, length, stride_length
    )  # fmt: skip
    begin, tokens = tiles.sequence_span(i_n, T, cu_seqlens)
    entering = tl.maximum(tokens + before - window, 0)
    entry = tiles.first_entry(i_n, begin + i_n.to(tl.int64) * before, entries, cu_seqlens, BT)
    chunks = tl.cdiv(entering, BT)
    per_segment = tl.cdiv(chunks, segments)
    first = i_s * per_segment
    last = tl.minimum(first + per_segment, chunks)
    slot, seen, oldest = tiles.earlier_tokens(i_n, at)
    begin = tiles.begin_of_keys(begin, i_n, at)
    p_k, p_v = k + (begin * H + i_h) * K, v + (begin * H + i_h) * V
    head_k = _locate_head(i_nh, H, SLOTS, slots, fresh, stride_initial_k)
    head_v = _locate_head(i_nh, H, SLOTS, slots, fresh, stride_initial_v)

    b_sk = tl.zeros([BK, BM], dtype=tl.float32)
    b_sv = tl.zeros([BV, BM], dtype=tl.float32)
    b_total = tl.zeros([BM], dtype=tl.float32)
    if not LOCAL:
        if local_g is not None:
            b_sk += tiles.load_columns(local_k + (i_s * NH + i_nh).to(tl.int64) * K * M + i_d * BK * M, M, BK, BM)
            b_sv += tiles.load_columns(local_v + (i_s * NH + i_nh).to(tl.int64) * V * M + i_d * BV * M, M, BV, BM)
        elif initial_k is not None:
            b_sk += _load_slots(initial_k, head_k, i_d * BK, BK, K, BM)
            b_sv += _load_slots(initial_v, head_v, i_d * BV, BV, V, BM)

    for i in range(first, last):
        o_t = i * BT + o_r
        m_t = o_t < entering
        if ring_k is not None:
            m_t = m_t & (o_t >= oldest)
        tile = (entry + i) * H + i_h
        if not LOCAL:
            tiles.store_columns(states_k + tile * K * M + i_d * BK * M, b_sk, M, BK, BM)
            tiles.store_columns(states_v + tile * V * M + i_d * BV * M, b_sv, M, BV, BM)
        b_k = tiles.load_tokens(
            p_k, o_t, m_t, H * K, ring_k, stride_ring_k, i_h * K, slot, seen, before, i_d * BK, BK
        )  # fmt: skip
        b_v = tiles.load_tokens(
            p_v, o_t, m_t, H * V, ring_v, stride_ring_v, i_h * V, slot, seen, before, i_d * BV, BV
        )  # fmt: skip
        b_w = tiles.load_columns(weight + tile * BT * M, M, BT, BM)
        b_end = tl.load(end + tile * M + o_m, mask=o_m < M, other=0.0)
        b_decay = tl.exp2(b_end)[None, :]
        b_sk = tl.dot(tl.trans(b_k), b_w, b_sk * b_decay, input_precision=DOT)
        b_sv = tl.dot(tl.trans(b_v), b_w, b_sv * b_decay, input_precision=DOT)
        b_total += b_end

    if LOCAL:
        index = (i_s * NH + i_nh).to(tl.int64)
        tiles.store_columns(local_k + index * K * M + i_d * BK * M, b_sk, M, BK, BM)
        tiles.store_columns(local_v + index * V * M + i_d * BV * M, b_sv, M, BV, BM)
        if i_d == 0:
            tl.store(local_g + index * M + o_m, b_total, mask=o_m < M)
    elif (last == chunks) & ((first < chunks) | (i_s == 0)):
        tile = (entry + chunks) * H + i_h
        tiles.store_columns(states_k + tile * K * M + i_d * BK * M, b_sk, M, BK, BM)
        tiles.store_columns(states_v + tile * V * M + i_d * BV * M, b_sv, M, BV, BM)
        _store_slots(final_k, b_sk, head_k, i_d * BK, BK, K, BM)
        _store_slots(final_v, b_sv, head_v, i_d * BV, BV, V, BM)


@cached_launch
@triton.jit(do_not_specialize=SIZES)
def slot_carry_kernel(
    outer, local, local_g, slots, fresh, stride_outer, NH, H, segments, M: tl.constexpr, SLOTS, D: tl.constexpr,
    BD: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    """Scan the segments: replace each segment's local final slots in `local` `[segments, NH, D, M]` by the slots that
    enter the segment. `outer` holds the initial slots; with `slots`, it is a pool.

    With BACKWARD, scan in reverse and store gradients of the slots after each segment; `outer` holds the gradients of
    the final slots.
    """
    i_nh, i_d = tl.program_id(0), tl.program_id(1) * BD
    o_m = tl.arange(0, M)
    b_s = tl.zeros([BD, M], dtype=tl.float32)
    if outer is not None:
        b_s += _load_slots(outer, _locate_head(i_nh, H, SLOTS, slots, fresh, stride_outer), i_d, BD, D, M)
    # prefetching is safe: each iteration reads and overwrites a different tile
    for i in tl.range(segments, num_stages=4):
        if BACKWARD:
            i = segments - 1 - i
        index = (i * NH + i_nh).to(tl.int64)
        p_s = local + _tile_offsets(index * D * M, i_d, BD, M)
        b_local, b_decay = tl.load(p_s), tl.exp2(tl.load(local_g + index * M + o_m))
        tl.store(p_s, b_s)
        b_s = b_s * b_decay[None, :] + b_local


@cached_launch
@triton.jit(do_not_specialize=SIZES)
def slot_gradients_kernel(
    q, do, p, dz, f, end, splits, dfinal_k, dfinal_v, cu_seqlens, local_k, local_v, local_g, ds_k, ds_v, dinitial_k,
    dinitial_v, T, NH, H, before, window, entries, segments, lead, M: tl.constexpr, SLOTS, BM: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, ND: tl.constexpr, GROUP: tl.constexpr, LOCAL: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    """Scan a segment in reverse: store the gradients of the slots after every chunk, `[entries, H, D, M]`, and of the
    initial slots. With LOCAL, start from zero; store only the gradients at the segment's start and its log2 decay."""
    i_s, i_nh = tl.program_id(0) // NH, tl.program_id(0) % NH
    i_d = tl.program_id(1)
    i_n, i_h = i_nh // H, i_nh % H
    HQ = H * GROUP
    BK: tl.constexpr = K // ND
    BV: tl.constexpr = V // ND
    o_r, o_m = tl.arange(0, BT), tl.arange(0, BM)

    begin, length = tiles.sequence_span(i_n, T, cu_seqlens)
    begin_k = begin + i_n.to(tl.int64) * before
    entry = tiles.first_entry(i_n, begin_k, entries, cu_seqlens, BT)
    entering = tl.maximum(length + before - window, 0)
    chunks = tl.cdiv(entering, BT)
    p_f = f + (begin_k * H + i_h) * SLOTS
    per_segment = tl.cdiv(chunks, segments)
    first = i_s * per_segment
    last = tl.minimum(first + per_segment, chunks)
    row = begin * HQ + i_h * GROUP
    head = _locate_head(i_nh, H, SLOTS, None, None, None)

    b_sk = tl.zeros([BK, BM], dtype=tl.float32)
    b_sv = tl.zeros([BV, BM], dtype=tl.float32)
    b_total = tl.zeros([BM], dtype=tl.float32)
    if not LOCAL:
        if local_g is not None:
            b_sk += tiles.load_columns(local_k + (i_s * NH + i_nh).to(tl.int64) * K * M + i_d * BK * M, M, BK, BM)
            b_sv += tiles.load_columns(local_v + (i_s * NH + i_nh).to(tl.int64) * V * M + i_d * BV * M, M, BV, BM)
        else:
            if dfinal_k is not None:
                b_sk += _load_slots(dfinal_k, head, i_d * BK, BK, K, BM)
            if dfinal_v is not None:
                b_sv += _load_slots(dfinal_v, head, i_d * BV, BV, V, BM)

    # query chunks before the first entering token read the initial slots, which have not decayed
    stop = first
    if (i_s == 0) & (not LOCAL):
        stop = -lead
    for step in range(tl.maximum(last - stop, 0)):
        i = last - 1 - step
        tile = (entry + tl.maximum(i, 0)) * H + i_h
        b_end = tl.load(end + tile * M + o_m, mask=o_m < tl.where(i >= 0, M, 0), other=0.0)
        count = tl.load(splits + tile, mask=i >= 0, other=0)
        if (i >= 0) & (not LOCAL):
            tiles.store_columns(ds_k + tile * K * M + i_d * BK * M, b_sk, M, BK, BM)
            tiles.store_columns(ds_v + tile * V * M + i_d * BV * M, b_sv, M, BV, BM)
        b_decay = tl.exp2(b_end)[None, :]
        b_sk *= b_decay
        b_sv *= b_decay
        o_t = i * BT + o_r + window - before
        m_t = (o_t >= 0) & (o_t < length)
        for i_g in range(GROUP):
            p_row = row + i_g
            b_q = _load_columns(q + p_row * K, o_t, m_t, HQ * K, i_d * BK, BK)
            b_do = _load_columns(do + p_row * V, o_t, m_t, HQ * V, i_d * BV, BV)
            b_dz = tiles.load_by_slot(dz + p_row * M, o_t, m_t, HQ, M, BM)
            b_p = tiles.load_by_slot(p + p_row * M, o_t, m_t, HQ, M, BM)
            b_dz, b_p = b_dz.to(b_q.dtype), b_p.to(b_q.dtype)
            if count > 0:
                o_j = i * BT + o_r
                b_f = tiles.load_gates(p_f, o_j, o_j < entering, H * SLOTS, SLOTS, BM)
                b_start = tiles.block_to_start(tiles.log2_gates(b_f, DOT), BT >> count, BT, DOT)
                b_dz, b_p = (b_dz * b_start).to(b_q.dtype), (b_p * b_start).to(b_q.dtype)
            b_sk = tl.dot(tl.trans(b_q), b_dz, b_sk, input_precision=DOT)
            b_sv = tl.dot(tl.trans(b_do), b_p, b_sv, input_precision=DOT)
        b_total += b_end

    if LOCAL:
        index = (i_s * NH + i_nh).to(tl.int64)
        tiles.store_columns(local_k + index * K * M + i_d * BK * M, b_sk, M, BK, BM)
        tiles.store_columns(local_v + index * V * M + i_d * BV * M, b_sv, M, BV, BM)
        if i_d == 0:
            tl.store(local_g + index * M + o_m, b_total, mask=o_m < M)
    elif dinitial_k is not None:  # noqa: SIM102
        if i_s == 0:
            _store_slots(dinitial_k, b_sk, head, i_d * BK, BK, K, BM)
            _store_slots(dinitial_v, b_sv, head, i_d * BV, BV, V, BM)


class Local(NamedTuple):
    """Results of the LOCAL pass for each segment: slots `[segments · N · H, K or V, M]`, log2 decays `[.., M]`."""

    local_k: Tensor | None
    local_v: Tensor | None
    local_g: Tensor | None


def slot_states(
    launch, x: Inputs, y: Layout, gates: Gates, results: Results, saved: Saved, pool: Pool | None = None
) -> None:
    """Store the slots before every chunk in `saved`, and those after each sequence's last token in `results`.

    With `pool`, the latter are the pool's tensors, which also have the initial slots.
    """
    config = tuning.scan_config(y.N * y.H, y.entries, y.M, x.q.dtype)
    launch_scan(
        launch, slot_states_kernel, config, x, y, outer=(x.slots_k, x.slots_v), pool=pool,
        k=x.k if x.k_slots is None else x.k_slots, v=x.v, weight=gates.weight, end=saved.end, initial_k=x.slots_k,
        initial_v=x.slots_v, cu_seqlens=x.cu_seqlens, states_k=saved.states_k, states_v=saved.states_v,
        final_k=results.final_k, final_v=results.final_v, **pool_of_scan(x, pool),
        BM=y.BM, BT=y.BT, ND=config.ND, DOT=y.DOT, num_stages=config.num_stages,
    )  # fmt: skip


def slot_gradients(launch, b: Backward, softmax: Softmax) -> SlotGradients:
    """Return the gradients of the slots after every chunk; write those of the initial slots to `b.grads`."""
    x, y, saved = b.x, b.y, b.saved
    slots = SlotGradients(torch.empty_like(saved.states_k), torch.empty_like(saved.states_v))
    config = tuning.scan_config(y.N * y.H, y.entries, y.M, x.q.dtype)
    launch_scan(
        launch, slot_gradients_kernel, config, x, y, outer=(b.dfinal_k, b.dfinal_v), backward=True,
        q=x.q if x.q_slots is None else x.q_slots, do=b.do, p=softmax.p, dz=softmax.dz, f=x.f, end=saved.end,
        splits=saved.splits, dfinal_k=b.dfinal_k, dfinal_v=b.dfinal_v, cu_seqlens=x.cu_seqlens, **slots._asdict(),
        dinitial_k=b.grads.dinitial_k, dinitial_v=b.grads.dinitial_v, lead=0 if b.grads.dinitial_k is None else y.lead,
        BM=y.BM, BT=y.BT, ND=config.ND, GROUP=y.GROUP, DOT=y.DOT, num_stages=config.num_stages,
    )  # fmt: skip
    return slots


def launch_scan(
    launch, kernel, config: tuning.ScanConfig, x: Inputs, y: Layout, *, outer: tuple[Tensor | None, Tensor | None],
    pool: Pool | None = None, backward: bool = False, **arguments,
) -> None:  # fmt: skip
    """Launch a scan over chunks; if sequences are split, first launch the LOCAL pass and the carry kernel.

    `outer` has the initial slots, those of `pool` if it is given, or, if `backward`, the gradients of the final slots.
    The kernel also gets `arguments`.
    """
    local = _empty_local(config, x, y)
    for is_local in (True, False) if config.segments > 1 else (False,):
        launch(
            kernel, (config.segments * y.N * y.H, config.ND),
            **arguments, **local._asdict(), T=y.T, NH=y.N * y.H, H=y.H, before=y.before, window=y.window,
            entries=y.entries, segments=config.segments, M=y.M, SLOTS=y.SLOTS, K=y.K, V=y.V, LOCAL=is_local,
            num_warps=config.num_warps,
        )  # fmt: skip
        if is_local:
            _carry(launch, config, y, outer, local, pool, backward)


def _empty_local(config: tuning.ScanConfig, x: Inputs, y: Layout) -> Local:
    if config.segments == 1:
        return Local(None, None, None)
    heads, wide = config.segments * y.N * y.H, torch.float32
    return Local(*empty(x.q, (((heads, y.K, y.M), wide), ((heads, y.V, y.M), wide), ((heads, y.M), wide))))


def pool_of_scan(x: Inputs, pool: Pool | None, *, gates: bool = False) -> dict:
    """Return the arguments of a forward scan for a pool; all are None without one. `gates`: the scan reads gates."""
    rings = {"ring_k": "ring_k" if x.k_slots is None else "ring_k_slots", "ring_v": "ring_v"}
    rings |= {"ring_f": "ring_f"} if gates else {}
    names = {**rings, "initial_k": "pool_k", "initial_v": "pool_v"}
    given = of_pool(pool, *names.values())
    return {
        **{name: given[of] for name, of in rings.items()},
        **{f"stride_{name}": given[f"stride_{of}"] for name, of in names.items()},
        **{name: given[name] for name in ("length", "stride_length", "slots", "fresh")},
    }


def _carry(
    launch, config: tuning.ScanConfig, y: Layout, outer: tuple, local: Local, pool: Pool | None, backward: bool
) -> None:
    """Replace the LOCAL results by those of the whole scan: each segment's final slots by the slots that enter it or,
    if `backward`, each segment's gradients of its entering slots by the gradients of its final slots.
    """
    for slots, local_slots, D in ((outer[0], local.local_k, y.K), (outer[1], local.local_v, y.V)):
        launch(
            slot_carry_kernel, (y.N * y.H, D // _CARRY_ROWS),
            outer=slots, local=local_slots, local_g=local.local_g, slots=pool and pool.slots,
            fresh=pool and pool.fresh, stride_outer=None if pool is None else slots.stride(0), NH=y.N * y.H, H=y.H,
            segments=config.segments, M=y.M, SLOTS=y.SLOTS, D=D, BD=_CARRY_ROWS, BACKWARD=backward, num_warps=4,
        )  # fmt: skip
