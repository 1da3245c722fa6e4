"""Split sequences into segments that are scanned in parallel, so that calls with few sequences and heads use many SMs.

A segment maps its entering state S to M S + L. `segment_states` computes L and M of all segments in parallel. A scan
over the segments of each sequence then gives the states that enter them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmix_core.chunking import chunk_slots, num_sequences
from tokenmix_core.kernels.launch.launcher import cached_launch
from tokenmix_core.kernels.triton.memory import load_rows
from tokenmix_core.kernels.triton.varlen import first_chunk, locate_chunk, locate_slot, sequence_span
from tokenmix_core.kernels.tuning import FLOAT32_DOT
from tokenmix_core.ops.gated_delta_rule import forward as forward_pass
from tokenmix_core.ops.gated_delta_rule import tuning
from tokenmix_core.ops.gated_delta_rule.constants import CHUNK, SIZES, dot_precision
from tokenmix_core.ops.gated_delta_rule.types import Inputs, parts_of
from tokenmix_core.ops.slots import Pool, slot_arguments

# The forward scan reads the state that enters a segment unless the decay over the segment before is below 2^-32. Each
# kernel rounds sums of decays differently. So the kernels that compute entering states use lower limits, which ensures
# that every state read was computed.
NEGLIGIBLE = tl.constexpr(-33.0)
# limit for `entering_kernel` and `pass_back_kernel`, the two scans over segments
NEGLIGIBLE_IN_SCAN = tl.constexpr(-32.5)


@cached_launch
@triton.jit(do_not_specialize=(*SIZES, "segment"))
def segment_kernel(
    k, v, inverse, gates, writes, initial_state, cu_seqlens, states, transitions, carries, slots, fresh, stride_state,
    T, N, H, group, tokens, segment,
    K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr, WRITES: tl.constexpr, L2NORM: tl.constexpr,
    PACKED: tl.constexpr, DOT: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Compute L or M of a segment, BV columns per program; a first segment's L starts from the initial state.

    M is computed by the recurrence with values of 0, starting from the identity matrix. The last segment of a sequence
    needs neither M nor L, and the first no M. A segment whose decay is below the limit needs no M. It needs L, scanned
    from its first chunk that is not negligible, only if the next segment is not the last and has a decay that is not
    below the limit. All chunks that are read are full. WRITES is the number of chunks that share a write factor, or 0.

    With `carries` every segment needs L, and M unless its decay is below the limit: `carries` is 0 for these, else 1.
    """
    OPEN: tl.constexpr = carries is not None
    i_tile, i_sh = tl.program_id(0) % ((K + V) // BV), tl.program_id(0) // ((K + V) // BV)
    HV = H * group
    i_s, i_hv = i_sh // HV, i_sh % HV
    i_n, bos, length, first = locate_chunk(i_s, T, segment, N, cu_seqlens, PACKED)
    i_m = i_tile - V // BV
    if not OPEN:  # noqa: SIM102
        if (first + segment >= length) | ((i_m >= 0) & (first == 0)):
            return
    p_gates = gates + (i_hv.to(tl.int64) * tokens + bos + first) * 4
    skipped = forward_pass.negligible_chunks(p_gates, segment, BT, L2NORM, NEGLIGIBLE)
    if WRITES:
        p_w = writes + forward_pass.first_write(i_n, bos, T, BT, WRITES, PACKED) * HV + i_hv
        skipped = forward_pass.bounded(skipped, p_w, HV, first, segment, BT, WRITES)
    if OPEN:
        if i_m == 0:
            tl.store(carries + i_sh, (skipped == 0).to(tl.int32))
        if (i_m >= 0) & (skipped > 0):
            return
    elif skipped > 0:
        if (i_m >= 0) | (first + 2 * segment >= length):
            return
        after = forward_pass.negligible_chunks(p_gates + segment * 4, segment, BT, L2NORM, NEGLIGIBLE)
        if WRITES:
            after = forward_pass.bounded(after, p_w, HV, first + segment, segment, BT, WRITES)
        if after > 0:
            return
    o_k, o_v = tl.arange(0, K), tl.arange(0, BV)
    p_tile = o_k[None, :] * V + i_tile * BV + o_v[:, None]
    if initial_state is not None:
        p_initial = initial_state + (i_n.to(tl.int64) * HV + i_hv) * K * V + p_tile
        rows = tl.where((first == 0) & (skipped == 0), BV, 0)
        if slots is not None:
            slot, held = locate_slot(i_n, slots, fresh)
            p_initial = initial_state + forward_pass.head_state(slot, stride_state, i_hv, K, V, PARTS)
            p_initial = p_initial + o_k[None, :] * (V * PARTS) + i_tile * BV + o_v[:, None]
            rows = tl.where(held, rows, 0)
        b_s = tl.load(p_initial, mask=o_v[:, None] < rows, other=0.0).to(tl.float32)
    else:
        b_s = tl.zeros([BV, K], tl.float32)
    # for M the values are 0: load no row of v
    b_s = tl.where((i_m >= 0) & (i_m * BV + o_v[:, None] == o_k[None, :]), 1.0, b_s)
    value_rows = tl.where(i_m >= 0, 0, BT)

    row = bos + first + skipped * BT
    p_k = k + (row * H + i_hv // group) * K
    p_v = v + (row * HV + i_hv) * V + i_tile * BV
    p_a = inverse + (row * HV + i_hv) * BT
    p_gates += skipped * BT * 4
    if WRITES > 1:
        b_bare = b_s
    for i_c in range(skipped, segment // BT):
        b_k = load_rows(p_k, H * K, BT, BT, K)
        b_v = load_rows(p_v, HV * V, value_rows, BT, BV)
        b_a = load_rows(p_a, HV * BT, BT, BT, BT)
        b_b, b_w, r_k, b_last = forward_pass.chunk_gates(p_gates, BT, BT)
        b_r = forward_pass.residual_of(b_s.to(k.dtype.element_ty), b_k, b_v, b_a, b_b, r_k, DOT)
        if WRITES:
            share = tl.load(p_w + ((first // BT + i_c) // WRITES).to(tl.int64) * HV).to(tl.float32)
        if WRITES == 1:
            b_w *= share
        b_s = forward_pass.next_state(b_s, b_r, b_k, b_b, b_w, b_last, DOT)
        if WRITES > 1:
            b_bare *= tl.exp2(b_last)
            if (i_c + 1) % WRITES == 0:
                b_s = b_bare + share * (b_s - b_bare)
                b_bare = b_s
        p_k += BT * H * K
        p_v += BT * HV * V
        p_a += BT * HV * BT
        p_gates += BT * 4

    if i_m >= 0:
        p_out = transitions + i_sh.to(tl.int64) * K * K + o_k[None, :] * K + i_m * BV + o_v[:, None]
    else:
        p_out = states + i_sh.to(tl.int64) * K * V + p_tile
    tl.store(p_out, b_s)


@triton.jit
def all_negligible(p_gates, segments, segment, BT: tl.constexpr):
    """True if every segment has negligible chunks (see `negligible_chunks`); 16 segments are checked at a time."""
    BS: tl.constexpr = 16
    BC: tl.constexpr = 128
    NT = segment // BT
    o_c = tl.maximum(NT - BC, 0) + tl.arange(0, BC)
    kept = 0
    for i in range(0, segments, BS):
        o_s = i + tl.arange(0, BS)
        p_b = p_gates + (o_s[:, None].to(tl.int64) * segment + o_c[None, :] * BT + BT - 1) * 4
        b_b = tl.load(p_b, mask=(o_s < segments)[:, None] & (o_c < NT)[None, :], other=0.0)
        # a segment's first chunk is negligible if the decay over the segment's other chunks is below the limit
        b_left = tl.sum(tl.where(o_c > 0, b_b, 0.0), 1)
        kept += tl.sum(((b_left >= NEGLIGIBLE_IN_SCAN) & (o_s < segments)).to(tl.int32), 0)
    return kept == 0


@cached_launch
@triton.jit(do_not_specialize=(*SIZES, "segment"))
def entering_kernel(
    gates, writes, cu_seqlens, states, transitions, entering, pool, slots, fresh, stride_state,
    T, H, group, tokens, segment,
    K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, WRITES: tl.constexpr,
    L2NORM: tl.constexpr, PACKED: tl.constexpr, DOT: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Compute the state that enters each segment, from L and M of the segments before it.

    With `slots`, also copy the initial state from the sequence's slot of `pool` to its first segment's entering state.
    Return at once if the decay over every segment but the last is below the limit, because no later kernel then reads
    the result; this needs normalised keys (L2NORM) and no `writes`. WRITES is the number of chunks that share a write
    factor, or 0.
    """
    i_v, i_nh = tl.program_id(0) % (V // BV), tl.program_id(0) // (V // BV)
    HV = H * group
    i_n, i_hv = i_nh // HV, i_nh % HV
    bos, length = sequence_span(i_n, T, cu_seqlens, PACKED)
    segments = tl.cdiv(length, segment)
    if segments < 2:
        return
    if slots is not None:
        slot, held = locate_slot(i_n, slots, fresh)
        o_row, o_column = tl.arange(0, K)[:, None], i_v * BV + tl.arange(0, BV)[None, :]
        p_initial = pool + forward_pass.head_state(slot, stride_state, i_hv, K, V, PARTS) + o_row * (V * PARTS)
        b_initial = tl.load(p_initial + o_column, mask=o_row < tl.where(held, K, 0), other=0.0).to(tl.float32)
        o_first = (first_chunk(i_n, bos, T, segment, PACKED).to(tl.int64) * HV + i_hv) * K * V
        tl.store(entering + o_first + o_row * V + o_column, b_initial)
    p_gates = gates + (i_hv.to(tl.int64) * tokens + bos) * 4
    if L2NORM and WRITES == 0:  # noqa: SIM102
        if all_negligible(p_gates, segments - 1, segment, BT):
            return
    i_sh = first_chunk(i_n, bos, T, segment, PACKED).to(tl.int64) * HV + i_hv
    o_k, o_b, o_v = tl.arange(0, K), tl.arange(0, BK), i_v * BV + tl.arange(0, BV)
    p_l, p_s = states + i_sh * K * V, entering + i_sh * K * V
    p_m = transitions + i_sh * K * K + o_k[:, None] * K + o_b[None, :]
    p_tile, p_part = o_k[:, None] * V + o_v[None, :], o_b[:, None] * V + o_v[None, :]
    skipped = forward_pass.negligible_chunks(p_gates, segment, BT, L2NORM, NEGLIGIBLE_IN_SCAN)
    if WRITES:
        p_w = writes + forward_pass.first_write(i_n, bos, T, BT, WRITES, PACKED) * HV + i_hv
        skipped = forward_pass.bounded(skipped, p_w, HV, 0, segment, BT, WRITES)
    before = skipped == 0
    for i in range(1, segments):
        p_gates += segment * 4
        here = False
        if i + 1 < segments:
            skipped = forward_pass.negligible_chunks(p_gates, segment, BT, L2NORM, NEGLIGIBLE_IN_SCAN)
            if WRITES:
                skipped = forward_pass.bounded(skipped, p_w, HV, i * segment, segment, BT, WRITES)
            here = skipped == 0
        if before | here:
            b_s = tl.load(p_l + p_tile)
            if before & (i > 1):
                # the barrier makes the stored entering state S visible to all threads, which read BK rows at a time
                tl.debug_barrier()
                for i_k in range(K // BK):
                    b_part = tl.load(p_s + i_k * BK * V + p_part)
                    b_s = tl.dot(tl.load(p_m + i_k * BK), b_part, b_s, input_precision=DOT)
            tl.store(p_s + HV * K * V + p_tile, b_s)
        before = here
        p_l += HV * K * V
        p_s += HV * K * V
        p_m += HV * K * K


@cached_launch
@triton.jit(do_not_specialize=(*SIZES, "segment"))
def pass_back_kernel(
    gates, writes, cu_seqlens, transitions, passed, T, HV, tokens, segment,
    K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, WRITES: tl.constexpr,
    PACKED: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Add Mᵀ times the gradient of the state that leaves a segment to the local gradient of its entering state.

    Both gradients are in `passed`, one entry per segment. A local gradient ignores later segments. It is complete, and
    stays unchanged, if the segment's decay is below the limit. WRITES is the number of chunks that share a write
    factor, or 0.
    """
    BC: tl.constexpr = 128
    i_v, i_nh = tl.program_id(0) % (V // BV), tl.program_id(0) // (V // BV)
    i_n, i_hv = i_nh // HV, i_nh % HV
    bos, length = sequence_span(i_n, T, cu_seqlens, PACKED)
    segments = tl.cdiv(length, segment)
    i_sh = first_chunk(i_n, bos, T, segment, PACKED).to(tl.int64) * HV + i_hv
    o_k, o_b, o_v = tl.arange(0, K), tl.arange(0, BK), i_v * BV + tl.arange(0, BV)
    p_gates = gates + (i_hv.to(tl.int64) * tokens + bos) * 4
    if WRITES:
        p_w = writes + forward_pass.first_write(i_n, bos, T, BT, WRITES, PACKED) * HV + i_hv
    # begin at 2: the first segment's gradient goes to no earlier segment, and the last segment receives none
    for i in range(2, segments):
        i_s = segments - i
        decay = 0.0
        for i_c in range(0, segment // BT, BC):
            o_c = i_c + tl.arange(0, BC)
            p_c = p_gates + (i_s * segment + o_c * BT + BT - 1).to(tl.int64) * 4
            decay += tl.sum(tl.load(p_c, mask=o_c < segment // BT, other=0.0), 0)
        remembers = decay > NEGLIGIBLE_IN_SCAN
        if WRITES:
            remembers |= forward_pass.bounded(1, p_w, HV, i_s * segment, segment, BT, WRITES) == 0
        if remembers:
            # the barrier makes the next segment's gradient visible to all threads, which read BK rows at a time
            tl.debug_barrier()
            p_s, p_m = passed + (i_sh + i_s * HV) * K * V, transitions + (i_sh + i_s * HV) * K * K
            b_ds = tl.load(p_s + o_k[:, None] * V + o_v[None, :])
            for i_k in range(K // BK):
                o_row = i_k * BK + o_b
                b_part = tl.load(p_s + HV * K * V + o_row[:, None] * V + o_v[None, :])
                b_ds = tl.dot(tl.load(p_m + o_row[None, :] * K + o_k[:, None]), b_part, b_ds, input_precision=DOT)
            tl.store(p_s + o_k[:, None] * V + o_v[None, :], b_ds)


def pass_back(
    gates: Tensor,
    transitions: Tensor,
    passed: Tensor,
    T: int,
    N: int,
    HV: int,
    segment: int,
    cu_seqlens: Tensor | None,
    writes: Tensor | None,
    run: int,
) -> None:
    """Replace local gradients of entering states in `passed`, which ignore later segments, by complete gradients.

    `run` is the number of chunks that share a factor in `writes`, 0 without `writes`.
    """
    K, V = passed.shape[2:]
    launch = tuning.scan_tile("entering", K, V, 4, N * HV)
    pass_back_kernel[(N * HV * (V // launch.BV),)](
        gates=gates, writes=writes, cu_seqlens=cu_seqlens, transitions=transitions, passed=passed, T=T, HV=HV,
        tokens=gates.shape[1], segment=segment, K=K, V=V, BT=CHUNK, BK=launch.BK, BV=launch.BV, WRITES=run,
        PACKED=cu_seqlens is not None, DOT=FLOAT32_DOT, num_warps=launch.num_warps, num_stages=launch.num_stages,
    )  # fmt: skip


def segment_states(
    x: Inputs, inverse: Tensor, gates: Tensor, segment: int, pool: Pool | None = None
) -> tuple[Tensor | None, Tensor | None]:
    """Return entering states and M of all segments, float32 `[slots, HV, K, …]`; None and None for whole sequences.

    The dimension `slots` has one entry per segment (`kernels.triton.varlen.first_chunk`). A sequence's first segment
    starts from the initial state and has neither of the two. The last segment, and every segment with a decay below the
    limit, has no M. Such entries are undefined. With `pool`, initial states are in its slots, and the first segment of
    a sequence with several has an entering state, a copy of the initial state.
    """
    if not segment:
        return None, None
    B, T, H, K = x.k.shape
    HV, V = x.v.shape[2:]
    N = num_sequences(x.k, x.cu_seqlens)
    slots = chunk_slots(B, T, segment, x.cu_seqlens)
    entering, states = (x.k.new_empty(slots, HV, K, V, dtype=torch.float32) for _ in range(2))
    transitions = x.k.new_empty(slots, HV, K, K, dtype=torch.float32)
    launch = tuning.scan_tile("segment", K, V, x.k.element_size(), slots * HV)
    BV = min(K, V, launch.BV)
    initial_state, in_pool = (x.initial_state, None) if pool is None else (pool.state, pool.state)
    slots_and_parts = {**slot_arguments(pool), "PARTS": parts_of(x.v, pool)}
    segment_kernel[(slots * HV * ((K + V) // BV),)](
        k=x.k, v=x.v, inverse=inverse, gates=gates, writes=x.writes, initial_state=initial_state, **slots_and_parts,
        cu_seqlens=x.cu_seqlens, states=states, transitions=transitions, carries=None, T=T, N=N, H=H, group=HV // H,
        tokens=B * T, segment=segment, K=K, V=V, BT=CHUNK, BV=BV, WRITES=x.chunks_per_write, L2NORM=x.qk_l2norm,
        PACKED=x.cu_seqlens is not None, DOT=dot_precision(x.k), num_warps=launch.num_warps,
        num_stages=launch.num_stages, maxnreg=launch.maxnreg,
    )  # fmt: skip
    launch = tuning.scan_tile("entering", K, V, x.k.element_size(), N * HV)
    entering_kernel[(N * HV * (V // launch.BV),)](
        gates=gates, writes=x.writes, cu_seqlens=x.cu_seqlens, states=states, transitions=transitions,
        entering=entering, pool=in_pool, **slots_and_parts, T=T, H=H, group=HV // H, tokens=B * T, segment=segment,
        K=K, V=V, BT=CHUNK, BK=launch.BK,
        BV=launch.BV, WRITES=x.chunks_per_write, L2NORM=x.qk_l2norm, PACKED=x.cu_seqlens is not None, DOT=FLOAT32_DOT,
        num_warps=launch.num_warps, num_stages=launch.num_stages,
    )  # fmt: skip
    return entering, transitions
