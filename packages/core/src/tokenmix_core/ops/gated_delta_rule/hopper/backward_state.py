"""Reverse scan over chunks on Hopper: dV, dS' and ⟨dS', S⟩ of each chunk, one program per segment and value head.

q k Ã dO S of chunk t − 1 ─ cp.async, 2 stages ─┐ during the MMAs of chunk t
dS' ─► dR = P'ᵀ dO + w K dS' ─► dY = Ãᵀ dR ─► dS ← 2^b dS + Qᵀ(γ dO) − Kᵀ(γ dY)     dS in registers
 └─► dS', ⟨dS', S⟩              └─► dV

P' are the scores with decay and β, γ = 2^b the decay since the chunk's start; README.md of the op has all letters.
"""

from typing import Any, NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from tokenmix_core.chunking import chunk_slots, num_sequences
from tokenmix_core.kernels.gluon import hopper
from tokenmix_core.kernels.launch.launcher import cached_launch
from tokenmix_core.ops.gated_delta_rule.constants import CHUNK, SIZES
from tokenmix_core.ops.gated_delta_rule.hopper import gates as gate_tiles
from tokenmix_core.ops.gated_delta_rule.hopper.segments import (
    Chunks,
    Factors,
    locate_segment,
    reverse_scan_end,
    reverse_scan_start,
)
from tokenmix_core.ops.gated_delta_rule.sequence_split import pass_back
from tokenmix_core.ops.gated_delta_rule.tile_order import longest_first
from tokenmix_core.ops.gated_delta_rule.types import Reverse, StateGradients


@cached_launch
@gluon.jit(do_not_specialize=[*SIZES, "segment"])
def backward_state_kernel(
    q, k, inverse, gates, writes, cu_seqlens, order, states, remainders, do, dfinal_state, passed, dv, dstates, ends,
    dinitial_state, scale, T, N, H, group, tokens, segment,
    K: gl.constexpr, V: gl.constexpr, BT: gl.constexpr, BV: gl.constexpr, L2NORM: gl.constexpr, PACKED: gl.constexpr,
    ORDERED: gl.constexpr,
):  # fmt: skip
    """Scan a segment in reverse. dS is transposed, `[V, K]`, with 16 rows per warp, so MMAs read it from registers.

    Vectors named `…_i` have the layout of a tile's rows, vectors named `…_j` the layout of its columns. `dfinal_state`,
    `dinitial_state` and `remainders` may be None. ORDERED: programs take segments in the order of `order`. `passed`
    holds gradients of the segments' entering states. If `dv` is None, the kernel only writes local gradients to
    `passed`, which ignore later segments; or, without `passed`, to `dinitial_state` for whole sequences, which ignore
    the final states. Else the scan starts from the next segment's gradient in `passed`; `reverse_scan_start` says where
    it starts without `passed`, and if the next segment's decay is negligible. `writes` has one factor per chunk.
    """
    LOCAL: gl.constexpr = dv is None
    CARRIED: gl.constexpr = dv is not None and passed is not None
    REMAINDERS: gl.constexpr = remainders is not None and dv is not None
    # one program computes all V columns: 16 per warp
    WARPS: gl.constexpr = V // 16
    dtype: gl.constexpr = q.dtype.element_ty
    # `b_ds` is RANGE · dS, so that float16 operands do not underflow
    RANGE: gl.constexpr = gate_tiles.range_factor(dtype, K, L2NORM)
    tile: gl.constexpr = hopper.mma_layout(K, WARPS)
    flat: gl.constexpr = hopper.mma_layout(BT, WARPS)
    # each warpgroup computes part of the columns of the scores P'
    square: gl.constexpr = hopper.mma_layout_split_n(BT, WARPS)
    row: gl.constexpr = gl.SliceLayout(1, square)
    col: gl.constexpr = gl.SliceLayout(0, square)
    flat_col: gl.constexpr = gl.SliceLayout(0, flat)
    left: gl.constexpr = gl.DotOperandLayout(0, flat, 2)
    left_k: gl.constexpr = gl.DotOperandLayout(0, tile, 2)
    line: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    HV = H * group
    i_s, i_hv, i_n, begin, length, start = locate_segment(
        gl.program_id(0), order, T, N, HV, segment, cu_seqlens, PACKED, ORDERED, WARPS
    )
    # an empty sequence also has one segment, whose program copies the final state's gradient to the initial state's
    if (start >= length) & (start > 0):
        return
    slot = hopper.first_chunk(i_n, begin, T, BT, PACKED)
    s_qk, s_vo, s_at = H * K, HV * V, HV * BT
    p_k, p_q = k + (begin * H + i_hv // group) * K, q + (begin * H + i_hv // group) * K
    p_do, p_dv = do + (begin * HV + i_hv) * V, hopper.pointer_or(dv, do) + (begin * HV + i_hv) * V
    p_a = inverse + (begin * HV + i_hv) * BT
    # the offset is clamped, because an empty sequence may begin past the last token
    p_gates = gates + (i_hv.to(gl.int64) * tokens + gl.minimum(begin, tokens - 1)) * 4
    o_s = (slot * HV + i_hv) * K * V
    p_ds, p_s, p_m = hopper.pointer_or(dstates, do) + o_s, states + o_s, hopper.pointer_or(remainders, states) + o_s
    p_end = hopper.pointer_or(ends, gates) + (slot * HV + i_hv) * V

    k_2 = gl.allocate_shared_memory(dtype, [2, BT, K], shared)
    q_2 = gl.allocate_shared_memory(dtype, [2, BT, K], shared)
    a_2 = gl.allocate_shared_memory(dtype, [2, BT, BT], shared)
    do_2 = gl.allocate_shared_memory(dtype, [2, BT, V], shared)
    s_2 = gl.allocate_shared_memory(dtype, [2, K, V], shared)
    if REMAINDERS:
        m_2 = gl.allocate_shared_memory(dtype, [2, K, V], shared)
    # dS, and later dY, pass through this buffer to global memory
    s_ds = gl.allocate_shared_memory(dtype, [K, V], shared)
    s_dy = s_ds.slice(0, BT)
    s_p = gl.allocate_shared_memory(dtype, [BT, BT], shared)
    s_gates = gl.allocate_shared_memory(gl.float32, [5, BT], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    g = gate_tiles.gate_vectors(s_gates)

    chunks, first = gl.cdiv(length, BT), start // BT
    end = gl.minimum(chunks, first + segment // BT)
    span = Chunks(first, end, chunks)
    if LOCAL and passed is None:
        started = reverse_scan_end(p_gates, None, HV, first, end, length, L2NORM)
    else:
        started = reverse_scan_start(
            p_gates, Factors(writes, slot, i_hv, HV), span, segment, length, line, L2NORM, LOCAL, CARRIED
        )
    if LOCAL and started == first:
        return
    o_v, o_k = gl.arange(0, V, gl.SliceLayout(1, tile)), gl.arange(0, K, gl.SliceLayout(0, tile))
    p_tile = (i_n.to(gl.int64) * HV + i_hv) * K * V + o_k[None, :] * V + o_v[:, None]
    b_ds = gl.zeros([V, K], gl.float32, tile)
    if dfinal_state is not None and started == chunks:
        b_ds = gl.load(dfinal_state + p_tile) * RANGE
    if CARRIED and (started == end) & (end < chunks):
        b_ds = gl.load(passed + ((i_s + 1).to(gl.int64) * HV + i_hv) * K * V + o_k[None, :] * V + o_v[:, None]) * RANGE
    o_i, o_j = gl.arange(0, BT, row), gl.arange(0, BT, col)
    zero, zero_p = gl.zeros([V, BT], gl.float32, flat), gl.zeros([BT, BT], gl.float32, square)

    token = gl.maximum(started - 1, 0) * BT
    hopper.async_copy_rows(k_2.index(0), p_k + token.to(gl.int64) * s_qk, s_qk, length - token, WARPS)
    hopper.async_copy_rows(q_2.index(0), p_q + token.to(gl.int64) * s_qk, s_qk, length - token, WARPS)
    hopper.async_copy_rows(a_2.index(0), p_a + token.to(gl.int64) * s_at, s_at, length - token, WARPS)
    hopper.async_copy_rows(do_2.index(0), p_do + token.to(gl.int64) * s_vo, s_vo, length - token, WARPS)
    if not LOCAL:
        hopper.async_copy_rows(
            s_2.index(0), p_s + (token // BT).to(gl.int64) * HV * K * V, V, gl.minimum(length, 1) * K, WARPS
        )
    if REMAINDERS:
        hopper.async_copy_rows(
            m_2.index(0), p_m + (token // BT).to(gl.int64) * HV * K * V, V, gl.minimum(length, 1) * K, WARPS
        )
    async_copy.commit_group()
    b_b, b_w, b_r, b_last = gate_tiles.load_gates(p_gates, token, length, line)
    for i in range(started - first):
        i_c = started - 1 - i
        token = i_c * BT
        stage, next_stage = i % 2, (i + 1) % 2
        s_k, s_q, s_a, s_do = k_2.index(stage), q_2.index(stage), a_2.index(stage), do_2.index(stage)
        s_s = s_2.index(stage)
        last = b_last
        gate_tiles.store_gate_vectors(
            g, b_b, b_w, b_r, last, RANGE, gate_tiles.write_factor(writes, slot + i_c, i_hv, HV)
        )
        async_copy.wait_group(0)
        if i_c > first:
            before = token.to(gl.int64) - BT
            hopper.async_copy_rows(k_2.index(next_stage), p_k + before * s_qk, s_qk, BT, WARPS)
            hopper.async_copy_rows(q_2.index(next_stage), p_q + before * s_qk, s_qk, BT, WARPS)
            hopper.async_copy_rows(a_2.index(next_stage), p_a + before * s_at, s_at, BT, WARPS)
            hopper.async_copy_rows(do_2.index(next_stage), p_do + before * s_vo, s_vo, BT, WARPS)
            if not LOCAL:
                hopper.async_copy_rows(s_2.index(next_stage), p_s + (i_c - 1).to(gl.int64) * HV * K * V, V, K, WARPS)
            if REMAINDERS:
                hopper.async_copy_rows(m_2.index(next_stage), p_m + (i_c - 1).to(gl.int64) * HV * K * V, V, K, WARPS)
            async_copy.commit_group()
        b_b, b_w, b_r, b_last = gate_tiles.load_gates(p_gates, token - BT, length, line)

        b_p = warpgroup_mma(s_q, s_k.permute((1, 0)), zero_p, use_acc=False, is_async=True)
        b_dh = gl.convert_layout((b_ds * (1 / RANGE)).to(dtype), left)
        b_dr = warpgroup_mma(b_dh, s_k.permute((1, 0)), zero, use_acc=False, is_async=True)
        s_ds.permute((1, 0)).store((b_ds * (1 / RANGE)).to(dtype))
        if i_c < end and not LOCAL:
            hopper.store_rows(p_ds + i_c.to(gl.int64) * HV * K * V, s_ds, V, K, WARPS)

        b_factors, b_i, n_i = gate_tiles.score_factors(s_q, g, scale, o_i, o_j, row, col, L2NORM, WARPS)
        b_p = warpgroup_mma_wait(1, deps=[b_p])
        s_p.store((b_p * b_factors).to(dtype))
        g.p.store(gl.exp2(b_i) * n_i * RANGE)
        fence_async_shared()
        if i_c < end and not LOCAL:
            # ⟨dS', S⟩ uses dS' before rounding and adds S's rounding errors if they are saved, because the terms of the
            # sum cancel
            b_s = gl.convert_layout(s_s.permute((1, 0)).load(left_k), tile).to(gl.float32)
            if REMAINDERS:
                b_s += gl.convert_layout(m_2.index(stage).permute((1, 0)).load(left_k), tile).to(gl.float32)
            gl.store(p_end + i_c.to(gl.int64) * HV * V + o_v, gl.sum(b_s * b_ds, 1) * (1 / RANGE))
        b_dr, b_dh = warpgroup_mma_wait(0, deps=[b_dr, b_dh])

        # dR = scale P'ᵀ dO + 2^(b_last − b) β ⊙ (K dS'); dY = Ãᵀ dR, which is dV
        b_dr = warpgroup_mma(s_do.permute((1, 0)), s_p, b_dr * g.w.load(flat_col)[None, :], is_async=True)
        b_do = s_do.permute((1, 0)).load(left_k).to(gl.float32)
        b_do = (b_do * g.p.load(gl.SliceLayout(0, left_k))[None, :]).to(dtype)
        b_dr = gl.convert_layout(warpgroup_mma_wait(0, deps=[b_dr]).to(dtype), left)
        b_dy = warpgroup_mma(b_dr, s_a, zero, use_acc=False, is_async=True)

        # dS = 2^b_last dS' + scale Qᵀ (γ ⊙ dO) − Kᵀ (γ ⊙ dY), γ = 2^b
        b_ds = warpgroup_mma(b_do, s_q, b_ds * gl.exp2(last), is_async=True)
        b_dy, b_dr = warpgroup_mma_wait(1, deps=[b_dy, b_dr])
        s_dy.permute((1, 0)).store(b_dy.to(dtype))
        b_dy = gl.convert_layout((b_dy * g.y.load(flat_col)[None, :]).to(dtype), left_k)
        b_ds = warpgroup_mma(b_dy, s_k, b_ds, is_async=True)
        if i_c < end and not LOCAL:
            hopper.store_rows(p_dv + token.to(gl.int64) * s_vo, s_dy, s_vo, length - token, WARPS)
        b_ds, b_dy, b_do = warpgroup_mma_wait(0, deps=[b_ds, b_dy, b_do])

    if LOCAL and passed is not None:
        b_ds *= 1 / RANGE
        gl.store(passed + (i_s.to(gl.int64) * HV + i_hv) * K * V + o_k[None, :] * V + o_v[:, None], b_ds)
    if dinitial_state is not None and first == 0:
        gl.store(dinitial_state + p_tile, b_ds * (1 / RANGE))


class Columns(NamedTuple):
    """A kernel, the number of columns of V that each of its programs computes, and the warps of a program."""

    kernel: Any
    columns: int
    warps: int


def launch_kernel(
    reverse: Reverse,
    of_states: StateGradients | None,
    passed: Tensor | None,
    by: Columns,
    initial: Tensor | None = None,
) -> None:
    """Launch the kernel of `by`; without `of_states`, compute only local gradients of the segments' entering states.

    These are written to `passed` or, for whole sequences, to `initial`.
    """
    x, terms, saved, do, dfinal_state, segment = reverse
    B, T, H, K = x.q.shape
    HV, V = x.v.shape[2:]
    order = longest_first(T, segment, x.cu_seqlens)
    dv, dstates, ends, dinitial_state, _ = of_states or (None, None, None, initial, None)
    by.kernel[(chunk_slots(B, T, segment, x.cu_seqlens) * HV * (V // by.columns),)](
        q=x.q, k=x.k, inverse=terms.inverse, gates=terms.gates, writes=x.writes, cu_seqlens=x.cu_seqlens, order=order,
        states=saved.states, remainders=saved.remainders, do=do,
        dfinal_state=dfinal_state, passed=passed, dv=dv, dstates=dstates, ends=ends, dinitial_state=dinitial_state,
        scale=x.scale, T=T,
        N=num_sequences(x.q, x.cu_seqlens), H=H, group=HV // H, tokens=B * T, segment=segment, K=K, V=V, BT=CHUNK,
        BV=by.columns, L2NORM=x.qk_l2norm, PACKED=x.cu_seqlens is not None, ORDERED=order is not None,
        num_warps=by.warps,
    )  # fmt: skip


def between_segments(reverse: Reverse, by: Columns | None = None) -> Tensor | None:
    """Return the gradients of the segments' entering states, from local gradients and matrices M; None without M."""
    x, terms, segment = reverse.x, reverse.terms, reverse.segment
    if terms.transitions is None:
        return None
    (B, T, _, K), (HV, V) = x.q.shape, x.v.shape[2:]
    passed = terms.gates.new_empty(chunk_slots(B, T, segment, x.cu_seqlens), HV, K, V)
    launch_kernel(reverse, None, passed, by or Columns(backward_state_kernel, V, V // 16))
    pass_back(
        gates=terms.gates, transitions=terms.transitions, passed=passed, T=T, N=num_sequences(x.q, x.cu_seqlens), HV=HV,
        segment=segment, cu_seqlens=x.cu_seqlens, writes=x.writes, run=x.chunks_per_write,
    )  # fmt: skip
    return passed


def initial_gradients(reverse: Reverse) -> Tensor:
    """Return the gradient of the state before each sequence, from the gradient of the outputs alone.

    `reverse.dfinal_state` is None, and `reverse.saved` is not read. Sequences are not packed. A scan starts at the last
    chunk whose effect is not negligible.
    """
    (B, _, _, K), (HV, V) = reverse.x.q.shape, reverse.x.v.shape[2:]
    found = reverse.terms.gates.new_empty(B, HV, K, V)
    launch_kernel(reverse, None, None, Columns(backward_state_kernel, V, V // 16), found)
    return found


def backward_state(reverse: Reverse, of_states: StateGradients, by: Columns | None = None) -> None:
    """Write dv, dS' of every chunk, partial sums of ⟨dS', S⟩ and the initial state's gradient into `of_states`.

    Each segment has a scan. With transition matrices M (`terms.transitions`) it starts at the segment's end, from the
    gradient that M has passed back, unless the next segment's decay is negligible; else at the last chunk, of this or a
    later segment, whose effect on the segment is not negligible.
    """
    V = reverse.x.v.shape[-1]
    by = by or Columns(backward_state_kernel, V, V // 16)
    launch_kernel(reverse, of_states, between_segments(reverse, by), by)
