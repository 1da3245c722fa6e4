"""Reverse scan over chunks on Hopper if K or V is 256, or if K = 128 and V = 64, in tiles.

One program computes 64 columns of V of a segment and value head.

    q k of chunk t − 1 ─ cp.async, 2 stages;  Ã, dO, halves of S ─ cp.async, 1 stage, refilled once read
    dS ─► smem ─► dR ─► smem ─► dY = Ãᵀ dR ─► smem ─► dS ← 2^b dS + Qᵀ(γ dO) − Kᵀ(γ dY)
     └─► dS', ⟨dS', S⟩            └─► dV

Two warpgroups split the columns of each result, so operands pass through shared memory, between barriers of the CTA.
The letters are those of `backward_state.py`.
"""

from functools import partial

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from tokenmix_core.kernels.gluon import hopper
from tokenmix_core.kernels.launch.launcher import cached_launch
from tokenmix_core.ops.gated_delta_rule.constants import SIZES
from tokenmix_core.ops.gated_delta_rule.hopper import gates as gate_tiles
from tokenmix_core.ops.gated_delta_rule.hopper.backward_state import Columns, backward_state
from tokenmix_core.ops.gated_delta_rule.hopper.forward_tiled import COLUMNS, WARPS
from tokenmix_core.ops.gated_delta_rule.hopper.segments import Chunks, Factors, locate_segment, reverse_scan_start


@gluon.jit
def halves(x, D: gl.constexpr):
    """Return the first and second half of the columns of a tile `[64, D]`."""
    return gl.split(x.reshape([64, 2, D // 2]).permute((0, 2, 1)))


@gluon.jit
def state_dot(b_ds, s_parts, col: gl.constexpr, REMAINDERS: gl.constexpr):
    """Return ⟨dS', S⟩ over half of the rows, for each column of V; REMAINDERS adds S's rounding errors to S."""
    tile: gl.constexpr = hopper.mma_layout_split_n(s_parts.shape[1], WARPS)
    b_s = s_parts.index(0).permute((1, 0)).load(tile).to(gl.float32)
    if REMAINDERS:
        b_s += s_parts.index(1).permute((1, 0)).load(tile).to(gl.float32)
    return gl.convert_layout(gl.sum(b_s * gl.convert_layout(b_ds, tile), 1), col)


@gluon.jit
def prefetch_half(s_parts, p_s, p_m, stride, rows, i: gl.constexpr, REMAINDERS: gl.constexpr):
    """Issue cp.async of the i-th half of S's rows and, with REMAINDERS, of their rounding errors."""
    hopper.async_copy_rows(s_parts.index(0), p_s + i * s_parts.shape[1] * stride, stride, rows, WARPS)
    if REMAINDERS:
        hopper.async_copy_rows(s_parts.index(1), p_m + i * s_parts.shape[1] * stride, stride, rows, WARPS)


@cached_launch
@gluon.jit(do_not_specialize=[*SIZES, "segment"])
def backward_state_kernel(
    q, k, inverse, gates, writes, cu_seqlens, order, states, remainders, do, dfinal_state, passed, dv, dstates, ends,
    dinitial_state, scale, T, N, H, group, tokens, segment,
    K: gl.constexpr, V: gl.constexpr, BT: gl.constexpr, BV: gl.constexpr, L2NORM: gl.constexpr, PACKED: gl.constexpr,
    ORDERED: gl.constexpr,
):  # fmt: skip
    """Scan a segment in reverse. dS is transposed, `[BV, K]`; each warpgroup has half of its columns.

    S and its rounding errors are loaded in two halves of their rows, to compute ⟨dS', S⟩ from unrounded dS' and S.
    ORDERED, `passed`, and the tensors that may be None: see `backward_state.py`.
    """
    LOCAL: gl.constexpr = dv is None
    CARRIED: gl.constexpr = dv is not None and passed is not None
    REMAINDERS: gl.constexpr = remainders is not None
    dtype: gl.constexpr = q.dtype.element_ty
    # `b_ds` is RANGE · dS, so that float16 operands do not underflow
    RANGE: gl.constexpr = gate_tiles.range_factor(dtype, K, L2NORM)
    # each half of S is split between the two warpgroups
    tile: gl.constexpr = hopper.mma_layout_split_n(K // 2, WARPS)
    flat: gl.constexpr = hopper.mma_layout_split_n(BT, WARPS)
    row: gl.constexpr = gl.SliceLayout(1, flat)
    col: gl.constexpr = gl.SliceLayout(0, flat)
    line: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    HV = H * group
    i_v, i_sh = gl.program_id(0) % (V // BV), gl.program_id(0) // (V // BV)
    i_s, i_hv, i_n, begin, length, start = locate_segment(
        i_sh, order, T, N, HV, segment, cu_seqlens, PACKED, ORDERED, WARPS
    )
    # an empty sequence also has one segment, whose program copies the final state's gradient to the initial state's
    if (start >= length) & (start > 0):
        return
    slot = hopper.first_chunk(i_n, begin, T, BT, PACKED)
    s_qk, s_vo, s_at = H * K, HV * V, HV * BT
    p_k, p_q = k + (begin * H + i_hv // group) * K, q + (begin * H + i_hv // group) * K
    o_vo = (begin * HV + i_hv) * V + i_v * BV
    p_do, p_dv = do + o_vo, hopper.pointer_or(dv, do) + o_vo
    p_a = inverse + (begin * HV + i_hv) * BT
    # the offset is clamped, because an empty sequence may begin past the last token
    p_gates = gates + (i_hv.to(gl.int64) * tokens + gl.minimum(begin, tokens - 1)) * 4
    o_s = (slot * HV + i_hv) * K * V + i_v * BV
    p_ds, p_s, p_m = hopper.pointer_or(dstates, do) + o_s, states + o_s, hopper.pointer_or(remainders, states) + o_s
    p_end = hopper.pointer_or(ends, gates) + (slot * HV + i_hv) * V + i_v * BV

    k_2 = gl.allocate_shared_memory(dtype, [2, BT, K], shared)
    q_2 = gl.allocate_shared_memory(dtype, [2, BT, K], shared)
    s_a = gl.allocate_shared_memory(dtype, [BT, BT], shared)
    s_do = gl.allocate_shared_memory(dtype, [BT, BV], shared)
    # buffers for half of S's rows, and for the rounding errors of this half
    parts = gl.allocate_shared_memory(dtype, [2, K // 2, BV], shared)
    # dS, and later dY, pass through this buffer to global memory
    s_ds = gl.allocate_shared_memory(dtype, [K, BV], shared)
    s_dy = s_ds.slice(0, BT)
    s_p = gl.allocate_shared_memory(dtype, [BT, BT], shared)
    s_gates = gl.allocate_shared_memory(gl.float32, [5, BT], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    g = gate_tiles.gate_vectors(s_gates)

    chunks, first = gl.cdiv(length, BT), start // BT
    end = gl.minimum(chunks, first + segment // BT)
    span = Chunks(first, end, chunks)
    started = reverse_scan_start(
        p_gates, Factors(writes, slot, i_hv, HV), span, segment, length, line, L2NORM, LOCAL, CARRIED
    )
    if LOCAL and started == first:
        return
    o_v, o_k = gl.arange(0, BV, gl.SliceLayout(1, tile)), gl.arange(0, K, gl.SliceLayout(0, tile))
    p_tile = (i_n.to(gl.int64) * HV + i_hv) * K * V + i_v * BV + o_k[None, :] * V + o_v[:, None]
    o_passed = i_hv.to(gl.int64) * K * V + i_v * BV + o_k[None, :] * V + o_v[:, None]
    b_ds = gl.zeros([BV, K], gl.float32, tile)
    if dfinal_state is not None and started == chunks:
        b_ds = gl.load(dfinal_state + p_tile) * RANGE
    if CARRIED and (started == end) & (end < chunks):
        b_ds = gl.load(passed + (i_s + 1).to(gl.int64) * HV * K * V + o_passed) * RANGE
    o_i, o_j = gl.arange(0, BT, row), gl.arange(0, BT, col)
    zero = gl.zeros([BV, BT], gl.float32, flat)

    token = gl.maximum(started - 1, 0) * BT
    before = token.to(gl.int64)
    hopper.async_copy_rows(k_2.index(0), p_k + before * s_qk, s_qk, length - token, WARPS)
    hopper.async_copy_rows(q_2.index(0), p_q + before * s_qk, s_qk, length - token, WARPS)
    async_copy.commit_group()
    chunk = (token // BT).to(gl.int64) * HV * K * V
    prefetch_half(parts, p_s + chunk, p_m + chunk, V, gl.minimum(length, 1) * K, 0, REMAINDERS)
    async_copy.commit_group()
    hopper.async_copy_rows(s_a, p_a + before * s_at, s_at, length - token, WARPS)
    hopper.async_copy_rows(s_do, p_do + before * s_vo, s_vo, length - token, WARPS)
    async_copy.commit_group()
    b_b, b_w, b_r, b_last = gate_tiles.load_gates(p_gates, token, length, line)
    for i in range(started - first):
        i_c = started - 1 - i
        token = i_c * BT
        s_k, s_q = k_2.index(i % 2), q_2.index(i % 2)
        here = i_c.to(gl.int64) * HV * K * V
        # index of the chunk to prefetch next; at the segment's first chunk `some` is 0, so no row is loaded
        then = gl.maximum(i_c - 1, 0).to(gl.int64)
        some = gl.where(i_c > first, K, 0)
        last = b_last
        gate_tiles.store_gate_vectors(
            g, b_b, b_w, b_r, last, RANGE, gate_tiles.write_factor(writes, slot + i_c, i_hv, HV)
        )
        hopper.wait_async_copies(2)
        b_b, b_w, b_r, b_last = gate_tiles.load_gates(p_gates, token - BT, length, line)

        b_p = warpgroup_mma(s_q, s_k.permute((1, 0)), zero, use_acc=False, is_async=True)
        s_ds.permute((1, 0)).store((b_ds * (1 / RANGE)).to(dtype))
        fence_async_shared()
        hopper.barrier()
        b_dr = warpgroup_mma(s_ds.permute((1, 0)), s_k.permute((1, 0)), zero, use_acc=False, is_async=True)
        if i_c < end and not LOCAL:
            hopper.store_rows(p_ds + here, s_ds, V, K, WARPS)

        # ⟨dS', S⟩ uses unrounded dS' and S, because the terms of the sum cancel
        ds_0, ds_1 = halves(b_ds, K)
        hopper.wait_async_copies(1)
        b_end = state_dot(ds_0, parts, row, REMAINDERS)
        hopper.barrier()
        prefetch_half(parts, p_s + here, p_m + here, V, BT * K, 1, REMAINDERS)
        async_copy.commit_group()
        hopper.async_copy_rows(k_2.index((i + 1) % 2), p_k + then * BT * s_qk, s_qk, some, WARPS)
        hopper.async_copy_rows(q_2.index((i + 1) % 2), p_q + then * BT * s_qk, s_qk, some, WARPS)
        async_copy.commit_group()

        b_factors, b_i, n_i = gate_tiles.score_factors(s_q, g, scale, o_i, o_j, row, col, L2NORM, WARPS)
        b_p = warpgroup_mma_wait(1, deps=[b_p])
        s_p.store((b_p * b_factors).to(dtype))
        g.p.store(gl.exp2(b_i) * n_i * RANGE)
        hopper.wait_async_copies(2)
        b_dr = warpgroup_mma_wait(0, deps=[b_dr])

        # dR = scale P'ᵀ dO + 2^(b_last − b) β ⊙ (K dS'); dY = Ãᵀ dR, which is dV
        b_dr = warpgroup_mma(s_do.permute((1, 0)), s_p, b_dr * g.w.load(col)[None, :], is_async=True)
        hopper.wait_async_copies(1)
        b_end += state_dot(ds_1, parts, row, REMAINDERS)
        hopper.barrier()
        prefetch_half(parts, p_s + then * HV * K * V, p_m + then * HV * K * V, V, some, 0, REMAINDERS)
        async_copy.commit_group()
        if i_c < end and not LOCAL:
            gl.store(p_end + i_c.to(gl.int64) * HV * V + gl.arange(0, BV, row), b_end * (1 / RANGE))
        b_do = s_do.permute((1, 0)).load(flat).to(gl.float32) * g.p.load(col)[None, :]
        b_dr = warpgroup_mma_wait(0, deps=[b_dr])
        # the buffer of the scores P' is reused for dR, and later for γ dY; the buffer of dO is reused for γ dO
        hopper.barrier()
        s_p.store(b_dr.to(dtype))
        s_do.permute((1, 0)).store(b_do.to(dtype))
        fence_async_shared()
        hopper.barrier()
        b_dy = warpgroup_mma(s_p, s_a, zero, use_acc=False, is_async=True)

        # dS = 2^b_last dS' + scale Qᵀ (γ ⊙ dO) − Kᵀ (γ ⊙ dY), γ = 2^b
        b_ds = warpgroup_mma(s_do.permute((1, 0)), s_q, b_ds * gl.exp2(last), is_async=True)
        b_dy = warpgroup_mma_wait(1, deps=[b_dy])
        hopper.barrier()
        s_dy.permute((1, 0)).store(b_dy.to(dtype))
        s_p.store((b_dy * g.y.load(col)[None, :]).to(dtype))
        fence_async_shared()
        hopper.barrier()
        b_ds = warpgroup_mma(s_p, s_k, b_ds, is_async=True)
        if i_c < end and not LOCAL:
            hopper.store_rows(p_dv + token.to(gl.int64) * s_vo, s_dy, s_vo, length - token, WARPS)
        b_ds = warpgroup_mma_wait(0, deps=[b_ds])
        hopper.barrier()
        hopper.async_copy_rows(s_a, p_a + then * BT * s_at, s_at, some, WARPS)
        hopper.async_copy_rows(s_do, p_do + then * BT * s_vo, s_vo, some, WARPS)
        async_copy.commit_group()
    async_copy.wait_group(0)

    if LOCAL:
        gl.store(passed + i_s.to(gl.int64) * HV * K * V + o_passed, b_ds * (1 / RANGE))
    if dinitial_state is not None and first == 0:
        gl.store(dinitial_state + p_tile, b_ds * (1 / RANGE))


# run `backward_state`, with the same arguments, but with the kernel of this module; K and V of 64, 128 or 256
backward_state_tiled = partial(backward_state, by=Columns(backward_state_kernel, COLUMNS, 8))
