"""Gradients of q, k, g and β on Hopper, in tiles, if K or V is 256: one program per chunk and value head.

cp.async dO dY R Q ─► E, F        S, then dS', in tiles of 64 columns ─ cp.async, 2 stages
Σ over tiles of S:  dO Sᵀ, dY Sᵀ ─► dQ ─► store;   Σ over tiles of dS':  R dS'ᵀ ─► X ─► dK, dβ, dg

The letters are those of `backward_chunk.py`.
"""

from functools import partial

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma_wait

from tokenmix_core.kernels.gluon import hopper
from tokenmix_core.kernels.launch.launcher import cached_launch
from tokenmix_core.ops.gated_delta_rule.constants import SIZES
from tokenmix_core.ops.gated_delta_rule.hopper.backward_chunk import (
    GateGradients,
    GatePointers,
    Warps,
    accumulate,
    apply_write_factor,
    backward_chunk,
    dot_rows,
    nonzero,
    scale_rows,
    store_gate_gradients,
    unnormalise,
)
from tokenmix_core.ops.gated_delta_rule.hopper.forward_tiled import WARPS
from tokenmix_core.ops.gated_delta_rule.hopper.gates import load_gate, range_factor


@cached_launch
@gluon.jit(do_not_specialize=SIZES)
def backward_chunk_kernel(
    q, k, g, gates, writes, cu_seqlens, do, dv, residual, states, dstates, ends, dq, dk, dg, dbeta, dwrites,
    scale, T, N, H, group, tokens,
    K: gl.constexpr, V: gl.constexpr, BT: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """Compute dq, dk, dg, dβ and `dwrites` of a chunk; during the MMAs of 64 columns of S or dS' the next are loaded.

    E, F and all sums are rounded as in `backward_chunk.py`. Two warpgroups together have enough registers
    for dO Sᵀ and dY Sᵀ at once, so S is read only once. All operands of MMAs are in shared memory.
    """
    dtype: gl.constexpr = q.dtype.element_ty
    RANGE: gl.constexpr = range_factor(dtype, K)
    square: gl.constexpr = hopper.mma_layout_split_n(BT, WARPS)
    tile: gl.constexpr = hopper.mma_layout_split_n(K, WARPS)
    row: gl.constexpr = gl.SliceLayout(1, square)
    col: gl.constexpr = gl.SliceLayout(0, square)
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    TILES: gl.constexpr = V // 64
    i_slot, i_hv = gl.program_id(0), gl.program_id(1)
    _, begin, length, start = hopper.locate_chunk(i_slot, T, BT, N, cu_seqlens, PACKED, WARPS)
    if start >= length:
        return
    first, rows = begin + start, length - start
    HV = H * group
    o_qk, o_vo, o_dqk = (first * H + i_hv // group) * K, (first * HV + i_hv) * V, (first * HV + i_hv) * K
    o_s = (i_slot.to(gl.int64) * HV + i_hv) * K * V
    p_s, p_ds = states + o_s, dstates + o_s

    s_q = gl.allocate_shared_memory(dtype, [BT, K], shared)
    s_k = gl.allocate_shared_memory(dtype, [BT, K], shared)
    s_r = gl.allocate_shared_memory(dtype, [TILES, BT, 64], shared)
    s_do = gl.allocate_shared_memory(dtype, [TILES, BT, 64], shared)
    s_dy = gl.allocate_shared_memory(dtype, [TILES, BT, 64], shared)
    states_2 = gl.allocate_shared_memory(dtype, [2, K, 64], shared)
    # the buffers of dO and dY are reused for E and F, each in two versions: the factor of K in dQ or dK, and the factor
    # that is transposed and multiplied by Q (E) or K (F); if V = 64, the second versions need a buffer of their own
    if TILES > 1:
        s_e, s_et, s_f, s_ft = s_do.index(0), s_do.index(1), s_dy.index(0), s_dy.index(1)
    else:
        s_more = gl.allocate_shared_memory(dtype, [2, BT, 64], shared)
        s_e, s_et, s_f, s_ft = s_do.index(0), s_more.index(0), s_dy.index(0), s_more.index(1)
    # dQ and dK are stored through a buffer that held a tile of S
    s_out = hopper.reinterpret(states_2.index((TILES - 1) % 2), dtype, [BT, K], shared)
    for i in gl.static_range(TILES):
        hopper.async_copy_rows(s_do.index(i), do + o_vo + i * 64, HV * V, rows, WARPS)
        hopper.async_copy_rows(s_dy.index(i), dv + o_vo + i * 64, HV * V, rows, WARPS)
        hopper.async_copy_rows(s_r.index(i), residual + o_vo + i * 64, HV * V, rows, WARPS)
    hopper.async_copy_rows(s_q, q + o_qk, H * K, rows, WARPS)
    async_copy.commit_group()
    hopper.async_copy_rows(states_2.index(0), p_s, V, K, WARPS)
    hopper.async_copy_rows(s_k, k + o_qk, H * K, rows, WARPS)
    async_copy.commit_group()
    if TILES > 1:
        hopper.async_copy_rows(states_2.index(1), p_s + 64, V, K, WARPS)
    else:
        hopper.async_copy_rows(states_2.index(1), p_ds, V, K, WARPS)
    async_copy.commit_group()

    p_gates = gates + (i_hv.to(gl.int64) * tokens + first) * 4
    b_i, last = load_gate(p_gates, rows, row), gl.load(p_gates + (gl.minimum(rows, BT) - 1) * 4)
    r_i, beta_i = load_gate(p_gates + 2, rows, row), load_gate(p_gates + 3, rows, row)
    d_i = nonzero(beta_i * r_i, r_i) * RANGE
    w_j = load_gate(p_gates + 1, rows, col)
    w_j, d_j = w_j * RANGE, nonzero(w_j, load_gate(p_gates + 2, rows, col)) * RANGE
    o_i, o_j = gl.arange(0, BT, row), gl.arange(0, BT, col)
    zero = gl.zeros([BT, BT], gl.float32, square)
    b_zero = gl.zeros([BT, K], gl.float32, tile)

    # E = scale (dO Rᵀ) ⊙ Γ, and F = −(dY Rᵀ) ⊙ Γ without its diagonal; each is rounded twice, once as a factor of K and
    # once, transposed, as a factor of Q or K
    hopper.wait_async_copies(2)
    b_e, b_f = zero, zero
    for i in gl.static_range(TILES):
        b_e = accumulate(s_do.index(i), s_r.index(i).permute((1, 0)), b_e)
        b_f = accumulate(s_dy.index(i), s_r.index(i).permute((1, 0)), b_f)
    b_q = s_q.load(hopper.row_layout(K, WARPS)).to(gl.float32)
    rq_i = gl.convert_layout(gl.rsqrt(gl.sum(b_q * b_q, 1) + 1e-6), row)
    b_e, b_f = warpgroup_mma_wait(0, deps=[b_e, b_f])
    b_j = load_gate(p_gates, rows, col)
    b_e *= hopper.causal_decay(b_i, b_j, o_i, o_j) * (scale * rq_i)[:, None]
    b_f *= -hopper.causal_decay(b_i, b_j, o_i, o_j + 1) * r_i[:, None]
    b_et, b_e = (b_e * d_j[None, :]).to(dtype), (b_e * w_j[None, :]).to(dtype)
    b_ft, b_f = (b_f * d_j[None, :]).to(dtype), (b_f * w_j[None, :]).to(dtype)

    # accumulate dO Sᵀ in `b_dq` and dY Sᵀ in `b_dk`
    b_dq, b_dk = b_zero, b_zero
    for i in gl.static_range(TILES):
        hopper.wait_async_copies(1)
        b_dq = accumulate(s_do.index(i), states_2.index(i % 2).permute((1, 0)), b_dq)
        b_dk = accumulate(s_dy.index(i), states_2.index(i % 2).permute((1, 0)), b_dk)
        b_dq, b_dk = warpgroup_mma_wait(0, deps=[b_dq, b_dk])
        hopper.barrier()
        if i + 2 < TILES:
            hopper.async_copy_rows(states_2.index(i % 2), p_s + (i + 2) * 64, V, K, WARPS)
        elif i + 2 == TILES:
            hopper.async_copy_rows(states_2.index(i % 2), p_ds, V, K, WARPS)
        async_copy.commit_group()
    s_e.store(b_e)
    s_et.store(b_et)
    s_f.store(b_f)
    s_ft.store(b_ft)
    fence_async_shared()
    hopper.barrier()

    # dQ̂ = scale γ dO Sᵀ + E β K̂, γ = 2^b
    b_dq = scale_rows(b_dq, gl.exp2(b_i) * scale * rq_i * RANGE, K, WARPS)
    b_dq = accumulate(s_e, s_k, b_dq)
    b_dq = warpgroup_mma_wait(0, deps=[b_dq]) * (1 / RANGE)
    dot_i = dot_rows(b_dq, s_q, row, K, WARPS)
    b_dq = unnormalise(b_dq, s_q, rq_i, dot_i, K, WARPS)
    s_out.store(b_dq.to(dtype))
    hopper.barrier()
    hopper.store_rows(dq + o_dqk, s_out, HV * K, rows, WARPS)
    hopper.barrier()
    if TILES > 1:
        hopper.async_copy_rows(states_2.index((TILES - 1) % 2), p_ds + 64, V, K, WARPS)
    async_copy.commit_group()

    # dK̂ = −γ dY Sᵀ + F β K̂ + β X, with γ and β as diagonal matrices; X: see below
    b_dk = scale_rows(b_dk, -gl.exp2(b_i) * r_i * RANGE, K, WARPS)
    b_dk = accumulate(s_f, s_k, b_dk)
    b_dk = warpgroup_mma_wait(0, deps=[b_dk]) * (1 / RANGE)
    dot_k_i = dot_rows(b_dk, s_k, row, K, WARPS)

    # X = w R dS'ᵀ + Eᵀ Q̂ + Fᵀ K̂ is the gradient of β K̂; w: decay from a token to the chunk's end
    b_x = b_zero
    for i in gl.static_range(TILES):
        hopper.wait_async_copies(1)
        b_x = accumulate(s_r.index(i), states_2.index((TILES + i) % 2).permute((1, 0)), b_x)
        b_x = warpgroup_mma_wait(0, deps=[b_x])
        hopper.barrier()
        if i + 2 < TILES:
            hopper.async_copy_rows(states_2.index((TILES + i) % 2), p_ds + (i + 2) * 64, V, K, WARPS)
        async_copy.commit_group()
    b_x = scale_rows(b_x, gl.exp2(last - b_i) * d_i, K, WARPS)
    out_i = dot_rows(b_x, s_k, row, K, WARPS) * (r_i / d_i)
    b_x, out_i = apply_write_factor(b_x, out_i, beta_i, writes, dwrites, i_slot.to(gl.int64) * HV + i_hv)
    b_x = accumulate(s_et.permute((1, 0)), s_q, b_x)
    b_x = accumulate(s_ft.permute((1, 0)), s_k, b_x)
    b_x = warpgroup_mma_wait(0, deps=[b_x])
    dbeta_i = dot_rows(b_x, s_k, row, K, WARPS) * (r_i / d_i)
    b_dk += scale_rows(b_x, beta_i * (r_i / d_i), K, WARPS)
    b_dk = unnormalise(b_dk, s_k, r_i, dot_k_i + beta_i * dbeta_i, K, WARPS)
    s_out.store(b_dk.to(dtype))
    hopper.barrier()
    hopper.store_rows(dk + o_dqk, s_out, HV * K, rows, WARPS)

    o_t, p_end = first * HV + i_hv, ends + (i_slot.to(gl.int64) * HV + i_hv) * V
    db_i = dot_i + dot_k_i
    pointers, vectors = GatePointers(g + o_t, dg + o_t, dbeta + o_t, p_end), GateGradients(beta_i, db_i, dbeta_i, out_i)
    store_gate_gradients(pointers, vectors, HV, rows, last, V, row, WARPS)


# run `backward_chunk`, with the same arguments, but with the kernel of this module; K and V of 64, 128 or 256
backward_chunk_tiled = partial(backward_chunk, by=Warps(backward_chunk_kernel, 8, 255))
