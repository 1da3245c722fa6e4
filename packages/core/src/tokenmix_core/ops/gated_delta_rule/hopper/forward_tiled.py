"""Forward on Hopper for K of 128 or 256, in tiles: one program per segment, value head and 64 columns of V.

For K = V = 128 this kernel runs only to save the states with their rounding errors; otherwise `forward.py` runs.

    k v Ã q of chunk t + 1 ─ cp.async, 2 stages ─┐ during the MMAs of chunk t
    S ─► smem ─► Y = V − γ K S ─► smem ─► R = Ã Y ─► smem ─► S' = 2^b S + Kᵀ(…R) ─► O = γ Q S + P' R ─► o

Two warpgroups split the columns of each result, so operands pass through shared memory, between barriers of the CTA.
S is the state before the chunk, R are the residuals, P' the scores with decay and β, γ = 2^b the decay since the
chunk's start; README.md of the op defines all letters.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from tokenmix_core.chunking import chunk_slots, num_sequences
from tokenmix_core.kernels.gluon import hopper
from tokenmix_core.kernels.launch.launcher import cached_launch
from tokenmix_core.ops.gated_delta_rule.constants import CHUNK, SIZES
from tokenmix_core.ops.gated_delta_rule.hopper.gates import gate_vectors, load_gates, store_gate_vectors, write_factor
from tokenmix_core.ops.gated_delta_rule.hopper.segments import Factors, locate_segment, locate_state, scan_start
from tokenmix_core.ops.gated_delta_rule.types import Inputs, Saved, Terms, state_arguments
from tokenmix_core.ops.slots import Pool

# columns of V per program: the rows of the transposed state
COLUMNS = 64
# two warpgroups, each of which computes half of a result's columns
WARPS = gl.constexpr(8)


@cached_launch
@gluon.jit(do_not_specialize=[*SIZES, "segment"])
def forward_kernel(
    q, k, v, inverse, gates, writes, entering, initial_state, cu_seqlens, order, o, final_state, residual, states,
    remainders, slots, fresh, stride_state, scale, T, N, H, group, tokens, segment,
    K: gl.constexpr, V: gl.constexpr, BT: gl.constexpr, BV: gl.constexpr, L2NORM: gl.constexpr, PACKED: gl.constexpr,
    ORDERED: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    """Compute outputs and final states or, without `o`, residuals, chunks' entering states and `remainders`, their
    rounding errors.

    S is transposed, `[BV, K]`; each warpgroup has half of its columns, and S passes through shared memory. ORDERED:
    programs take segments in the order of `order`. `writes` has one factor per chunk. `slots` and PARTS are as in the
    Triton kernel of `../forward.py`.
    """
    SAVE: gl.constexpr = o is None
    dtype: gl.constexpr = q.dtype.element_ty
    tile: gl.constexpr = hopper.mma_layout_split_n(K, WARPS)
    flat: gl.constexpr = hopper.mma_layout_split_n(BT, WARPS)
    row: gl.constexpr = gl.SliceLayout(1, flat)
    col: gl.constexpr = gl.SliceLayout(0, flat)
    line: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    HV = H * group
    i_v, i_sh = gl.program_id(0) % (V // BV), gl.program_id(0) // (V // BV)
    located = locate_segment(i_sh, order, T, N, HV, segment, cu_seqlens, PACKED, ORDERED, WARPS)
    i_s, i_hv, i_n, begin, length, first = located
    # an empty sequence also has one segment, whose program copies the initial state to the final state
    if (first >= length) & (first > 0):
        return
    slot = hopper.first_chunk(i_n, begin, T, BT, PACKED)
    begun = scan_start(gates, Factors(writes, slot, i_hv, HV), located, tokens, segment, L2NORM, WARPS)
    s_qk, s_vo, s_at = H * K, HV * V, HV * BT
    p_k, p_q = k + (begin * H + i_hv // group) * K, q + (begin * H + i_hv // group) * K
    o_vo = (begin * HV + i_hv) * V + i_v * BV
    p_v, p_o, p_r = v + o_vo, hopper.pointer_or(o, v) + o_vo, hopper.pointer_or(residual, v) + o_vo
    p_a = inverse + (begin * HV + i_hv) * BT
    # the offset is clamped, because an empty sequence may begin past the last token
    p_gates = gates + (i_hv.to(gl.int64) * tokens + gl.minimum(begin, tokens - 1)) * 4
    o_s = (slot * HV + i_hv) * K * V + i_v * BV
    p_s, p_m = hopper.pointer_or(states, v) + o_s, hopper.pointer_or(remainders, v) + o_s

    k_2 = gl.allocate_shared_memory(dtype, [2, BT, K], shared)
    v_2 = gl.allocate_shared_memory(dtype, [2, BT, BV], shared)
    a_2 = gl.allocate_shared_memory(dtype, [2, BT, BT], shared)
    s_s = gl.allocate_shared_memory(dtype, [K, BV], shared)
    s_y = gl.allocate_shared_memory(dtype, [BV, BT], shared)
    s_u = gl.allocate_shared_memory(dtype, [BV, BT], shared)
    s_r = gl.allocate_shared_memory(dtype, [BV, BT], shared)
    if SAVE:
        s_m = gl.allocate_shared_memory(dtype, [K, BV], shared)
    else:
        q_2 = gl.allocate_shared_memory(dtype, [2, BT, K], shared)
        s_p = gl.allocate_shared_memory(dtype, [BT, BT], shared)
    s_gates = gl.allocate_shared_memory(gl.float32, [5, BT], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    g = gate_vectors(s_gates)

    end = gl.minimum(first + segment, length)
    o_v, o_k = gl.arange(0, BV, gl.SliceLayout(1, tile)), gl.arange(0, K, gl.SliceLayout(0, tile))
    o_tile = i_v * BV + o_k[None, :] * V + o_v[:, None]
    o_state = (i_n.to(gl.int64) * HV + i_hv) * K * V
    b_s = gl.zeros([BV, K], gl.float32, tile)
    o_last = o_tile
    if slots is not None:
        o_state, reads, keeps = locate_state(i_n, i_hv, slots, fresh, stride_state, K, V, PARTS)
        o_last = i_v * BV + o_k[None, :] * (V * PARTS) + o_v[:, None]
        if reads & (length <= segment):
            b_s = gl.load(initial_state + o_state + o_last).to(gl.float32)
    elif initial_state is not None and first == 0:
        b_s = gl.load(initial_state + o_state + o_tile)
    split = first > 0
    if slots is not None:
        split = length > segment
    if split & (begun == first):
        b_s = gl.load(hopper.pointer_or(entering, gates) + (i_s.to(gl.int64) * HV + i_hv) * K * V + o_tile)
    o_i, o_j = gl.arange(0, BT, row), gl.arange(0, BT, col)
    zero = gl.zeros([BT, BT], gl.float32, flat)

    token = begun.to(gl.int64)
    hopper.async_copy_rows(k_2.index(0), p_k + token * s_qk, s_qk, length - begun, WARPS)
    hopper.async_copy_rows(v_2.index(0), p_v + token * s_vo, s_vo, length - begun, WARPS)
    hopper.async_copy_rows(a_2.index(0), p_a + token * s_at, s_at, length - begun, WARPS)
    if not SAVE:
        hopper.async_copy_rows(q_2.index(0), p_q + token * s_qk, s_qk, length - begun, WARPS)
    async_copy.commit_group()
    b_b, b_w, b_r, b_last = load_gates(p_gates, begun, length, line)
    for i in range(gl.cdiv(end - begun, BT)):
        start = begun + i * BT
        stage, next_stage = i % 2, (i + 1) % 2
        s_k, s_v, s_a = k_2.index(stage), v_2.index(stage), a_2.index(stage)
        stored = start >= first
        last = b_last
        factor = write_factor(writes, slot + start // BT, i_hv, HV)
        store_gate_vectors(g, b_b, b_w, b_r, last, 1.0, factor)
        # store S and its rounding error
        b_h = b_s.to(dtype)
        s_s.permute((1, 0)).store(b_h)
        if SAVE:
            s_m.permute((1, 0)).store((b_s - b_h.to(gl.float32)).to(dtype))
        hopper.wait_async_copies(0)
        b_y = warpgroup_mma(s_s.permute((1, 0)), s_k.permute((1, 0)), zero, use_acc=False, is_async=True)
        after = start.to(gl.int64) + BT
        left = length - start - BT
        hopper.async_copy_rows(k_2.index(next_stage), p_k + after * s_qk, s_qk, left, WARPS)
        hopper.async_copy_rows(v_2.index(next_stage), p_v + after * s_vo, s_vo, left, WARPS)
        hopper.async_copy_rows(a_2.index(next_stage), p_a + after * s_at, s_at, left, WARPS)
        if not SAVE:
            hopper.async_copy_rows(q_2.index(next_stage), p_q + after * s_qk, s_qk, left, WARPS)
        async_copy.commit_group()
        b_b, b_w, b_r, b_last = load_gates(p_gates, start + BT, length, line)

        # Y = V − γ ⊙ K S: values minus their decayed recall, γ = 2^b
        if SAVE:
            chunk = (start // BT).to(gl.int64) * HV * K * V
            b_y = warpgroup_mma_wait(0, deps=[b_y])
        else:
            s_q = q_2.index(stage)
            b_p = warpgroup_mma(s_k, s_q.permute((1, 0)), zero, use_acc=False, is_async=True)
            b_o = warpgroup_mma(s_s.permute((1, 0)), s_q.permute((1, 0)), zero, use_acc=False, is_async=True)
            b_y = warpgroup_mma_wait(2, deps=[b_y])
        b_v = s_v.permute((1, 0)).load(flat).to(gl.float32)
        s_y.store((b_v + b_y * g.y.load(col)[None, :]).to(dtype))
        fence_async_shared()
        hopper.barrier()
        # residuals R = Ã Y with Y = V − γ K S, and S ← 2^b_last S + Kᵀ (2^(b_last − b) β ⊙ R)
        b_x = warpgroup_mma(s_y, s_a.permute((1, 0)), zero, use_acc=False, is_async=True)
        if SAVE:
            hopper.store_rows(p_s + chunk, s_s, V, gl.where(stored, K, 0), WARPS)
            hopper.store_rows(p_m + chunk, s_m, V, gl.where(stored, K, 0), WARPS)
            b_x = warpgroup_mma_wait(0, deps=[b_x])
            s_r.permute((1, 0)).store(b_x.to(dtype))
        else:
            if L2NORM:
                b_q = s_q.load(hopper.row_layout(K, WARPS)).to(gl.float32)
                g.q.store(gl.rsqrt(gl.sum(b_q * b_q, 1) + 1e-6) * scale)
            else:
                g.q.store(gl.full([BT], scale, gl.float32, line))
            b_p = warpgroup_mma_wait(2, deps=[b_p])
            b_i = g.b.load(row)
            b_decay = gl.where(o_i[:, None] <= o_j[None, :], g.b.load(col)[None, :] - b_i[:, None], float("-inf"))
            s_p.store((b_p * gl.exp2(b_decay) * g.p.load(row)[:, None]).to(dtype))
            b_o, b_x = warpgroup_mma_wait(0, deps=[b_o, b_x])
            s_r.store(b_x.to(dtype))
        s_u.store((b_x * g.w.load(col)[None, :]).to(dtype))
        fence_async_shared()
        hopper.barrier()
        b_s = warpgroup_mma(s_u, s_k, b_s * gl.exp2(last), is_async=True)
        rows = gl.where(stored, length - start, 0)
        if SAVE:
            hopper.store_rows(p_r + start.to(gl.int64) * s_vo, s_r, s_vo, rows, WARPS)
        else:
            b_o = warpgroup_mma(s_r, s_p, b_o * gl.exp2(g.b.load(col))[None, :], is_async=True)
            b_o = warpgroup_mma_wait(0, deps=[b_o])
            s_y.permute((1, 0)).store((b_o * g.q.load(col)[None, :]).to(dtype))
            hopper.barrier()
            hopper.store_rows(p_o + start.to(gl.int64) * s_vo, s_y, s_vo, rows, WARPS)
        b_s = warpgroup_mma_wait(0, deps=[b_s])
        hopper.barrier()
    async_copy.wait_group(0)
    if not SAVE and end >= length:
        if slots is not None:
            if keeps:
                gl.store(final_state + o_state + o_last, b_s.to(final_state.dtype.element_ty))
        else:
            gl.store(final_state + o_state + o_tile, b_s)


def forward_tiled(
    x: Inputs,
    terms: Terms,
    *,
    order: Tensor | None,
    segment: int,
    o: Tensor | None,
    final_state: Tensor | None,
    saved: Saved | None,
    pool: Pool | None = None,
) -> None:
    """Write outputs and final states; or, if `saved` is given, residuals, chunk states and their rounding errors."""
    B, T, H, K = x.q.shape
    HV, V = x.v.shape[2:]
    # for whole sequences, use segments at least as long as any sequence
    segment = segment or (T // CHUNK + 1) * CHUNK
    residual, states, remainders = saved or (None, None, None)
    forward_kernel[(chunk_slots(B, T, segment, x.cu_seqlens) * HV * (V // COLUMNS),)](
        q=x.q, k=x.k, v=x.v, inverse=terms.inverse, gates=terms.gates, writes=x.writes, entering=terms.entering,
        **state_arguments(x, final_state, pool), cu_seqlens=x.cu_seqlens, order=order, o=o,
        residual=residual, states=states, remainders=remainders, scale=x.scale, T=T,
        N=num_sequences(x.q, x.cu_seqlens), H=H, group=HV // H, tokens=B * T, segment=segment, K=K, V=V, BT=CHUNK,
        BV=COLUMNS, L2NORM=x.qk_l2norm, PACKED=x.cu_seqlens is not None, ORDERED=order is not None, num_warps=8,
    )  # fmt: skip
