"""SSD gradients of a chunk on Hopper: one program per chunk and R value heads of a group; it sums the heads' dq and dk.

    q k ─ cp.async ─┐                         loop over R heads                        epilogue
    v dO S D ─ cp.async, 2 stages ─ wait ─► P, dP, M ─► dV ─► dQ, dK += … ─┐
          ▲                                                                ├─► dQ += (Σ dP) K, dK += (Σ dP)ᵀ Q, dg, ddt
          └──────────── prefetch head r + 1 during the MMAs of head r ─────┘

S is the state before the chunk, D the gradient of the state after it; the other letters are those of README.md. MMAs
that the heads share are computed after the loop: Σ dQ = Σ_h diag(scale e^b_h) dO_h S_hᵀ + (Σ_h dP_h) K, and likewise
dK. Sums for dg stay partial, per warp or warpgroup, until the loop ends, so that no warp waits for another warp.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tokenmix_core.kernels.gluon import hopper
from tokenmix_core.kernels.launch.launcher import cached_launch
from tokenmix_core.ops.ssd.hopper import smem_vectors as smem
from tokenmix_core.ops.ssd.hopper.intra_chunk import PathSums, intra_chunk_gradients

CHUNK = gl.constexpr(64)


@cached_launch
@gluon.jit(do_not_specialize=["T", "N", "G", "HV"])
def group_gradients_kernel(
    q, k, v, do, g, dt, skip, states, dstates, dq, dk, dv, dg, ddt, dskip, cu_seqlens,
    stride_q, stride_k, stride_v, stride_do, scale, T, N, G, HV,
    K: gl.constexpr, V: gl.constexpr, R: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """Compute all gradients of a chunk and R heads; strides between tokens are in units of 16 bytes (8 elements).

    Names that end in `_h` are vectors of all R heads in shared memory.
    """
    BT: gl.constexpr = CHUNK
    W: gl.constexpr = gl.num_warps()
    dtype: gl.constexpr = q.dtype.element_ty
    wide: gl.constexpr = hopper.mma_layout_split_n(K, W)
    narrow: gl.constexpr = hopper.mma_layout_split_n(V, W)
    left: gl.constexpr = gl.DotOperandLayout(0, wide, 2)
    lines: gl.constexpr = hopper.row_layout(V, W)
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    parts = HV // R
    i_c, i_r = gl.program_id(0) // parts, gl.program_id(0) % parts
    _, begin, length, start = hopper.locate_chunk(i_c, T, BT, N, cu_seqlens, PACKED, W)
    if start >= length:
        return
    first, rows = begin + start, length - start
    # strides come in units of 8 elements, which tells the compiler that rows are 16-byte aligned
    stride_q, stride_k, stride_v, stride_do = stride_q * 8, stride_k * 8, stride_v * 8, stride_do * 8
    i_g = i_r * R // (HV // G)

    s_q = gl.allocate_shared_memory(dtype, [BT, K], shared)
    s_k = gl.allocate_shared_memory(dtype, [BT, K], shared)
    v_2 = gl.allocate_shared_memory(dtype, [2, BT, V], shared)
    do_2 = gl.allocate_shared_memory(dtype, [2, BT, V], shared)
    s_2 = gl.allocate_shared_memory(dtype, [2, K, V], shared)
    d_2 = gl.allocate_shared_memory(dtype, [2, K, V], shared)
    s_p = gl.allocate_shared_memory(dtype, [BT, BT], shared)
    # dV reuses P's buffer if it fits
    s_dv = s_p if V == BT else gl.allocate_shared_memory(dtype, [BT, V], shared)
    b_h, from_h, to_h = smem.allocate_vectors(R, BT), smem.allocate_vectors(R, BT), smem.allocate_vectors(R, BT)
    row_h, query_h, key_h = (
        smem.allocate_parts(R, W // 4),
        smem.allocate_parts(R, W // 4),
        smem.allocate_parts(R, W // 4),
    )
    column_h, end_h = smem.allocate_parts(R, 4), smem.allocate_vectors(R, K)
    own_h, skip_h = smem.allocate_parts(R, W // 4), smem.allocate_parts(R, W // 4)
    sums = PathSums(row_h, column_h, own_h, skip_h)
    o_s = (i_c.to(gl.int64) * HV + i_r * R) * K * V
    p_v, p_do = v + first * stride_v + i_r * R * V, do + first * stride_do + i_r * R * V
    hopper.async_copy_rows(s_q, q + first * stride_q + i_g * K, stride_q, rows, W)
    hopper.async_copy_rows(s_k, k + first * stride_k + i_g * K, stride_k, rows, W)
    hopper.async_copy_rows(v_2.index(0), p_v, stride_v, rows, W)
    hopper.async_copy_rows(do_2.index(0), p_do, stride_do, rows, W)
    hopper.async_copy_rows(s_2.index(0), states + o_s, V, K, W)
    hopper.async_copy_rows(d_2.index(0), dstates + o_s, V, K, W)
    async_copy.commit_group()
    smem.store_decays(b_h, from_h, to_h, smem.load_vectors(g + first * HV + i_r * R, HV, rows, R), scale)
    if dt is not None:
        dt_h = smem.allocate_vectors(R, BT)
        smem.as_matrix(dt_h, R, BT).store(smem.load_vectors(dt + first * HV + i_r * R, HV, rows, R))
    b_dq, b_dk = gl.zeros([BT, K], gl.float32, wide), gl.zeros([BT, K], gl.float32, wide)
    sum_dp = gl.zeros([BT, BT], gl.float32, hopper.mma_layout_split_n(BT, W))
    for r in range(R):
        stage, next_stage = r % 2, (r + 1) % 2
        s_v, s_do, s_s, s_d = v_2.index(stage), do_2.index(stage), s_2.index(stage), d_2.index(stage)
        hopper.wait_async_copies(0)
        if r + 1 < R:
            p_v, p_do, o_s = p_v + V, p_do + V, o_s + K * V
            hopper.async_copy_rows(v_2.index(next_stage), p_v, stride_v, rows, W)
            hopper.async_copy_rows(do_2.index(next_stage), p_do, stride_do, rows, W)
            hopper.async_copy_rows(s_2.index(next_stage), states + o_s, V, K, W)
            hopper.async_copy_rows(d_2.index(next_stage), dstates + o_s, V, K, W)
            async_copy.commit_group()
        end_h.index(r).store(gl.sum(s_s.load(lines).to(gl.float32) * s_d.load(lines).to(gl.float32), 1))

        # P, dP and M (see README.md); row and column sums of M are terms of the gradients of decays inside the chunk
        b_qk, b_dp = smem.multiply(s_q, s_k.permute((1, 0)), BT), smem.multiply(s_do, s_v.permute((1, 0)), BT)
        b_kd = smem.multiply(s_k, s_d, V)
        b_qk, b_dp = warpgroup_mma_wait(1, deps=[b_qk, b_dp])
        b_p, b_dp = intra_chunk_gradients(
            b_qk, b_dp, b_h.index(r), None if dt is None else dt_h.index(r),
            None if skip is None else gl.load(skip + i_r * R + r).to(gl.float32),
            sums, r, scale,
        )  # fmt: skip
        s_p.store(b_p.to(dtype))
        sum_dp += b_dp
        fence_async_shared()
        hopper.barrier()

        # dV = Pᵀ dO + e^(b_C − b) K D; dK += e^(b_C − b) V Dᵀ, both factors times Δ if given; D: gradient of the
        # state after the chunk, b_C: the last b
        b_kd = warpgroup_mma_wait(0, deps=[b_kd])
        b_kd *= smem.column(to_h, r, narrow)
        smem.store_row_sums(key_h, r, b_kd * s_v.load(narrow).to(gl.float32))
        to_k = smem.column(to_h, r, left)
        if dt is not None:
            b_kd *= smem.column(dt_h, r, narrow)
            to_k *= smem.column(dt_h, r, left)
        b_dv = warpgroup_mma(s_p.permute((1, 0)), s_do, b_kd, is_async=True)
        b_v = (s_v.load(left).to(gl.float32) * to_k).to(dtype)
        b_dk = warpgroup_mma(b_v, s_d.permute((1, 0)), b_dk, is_async=True)
        b_dv = warpgroup_mma_wait(1, deps=[b_dv])
        hopper.barrier()
        s_dv.store(b_dv.to(dtype))

        # dQ += scale e^b dO Sᵀ; q_i · (S do_i), from the same MMA, is a term of dg
        b_qs = smem.multiply(s_q, s_s, V)
        b_qs, b_dk, b_v = warpgroup_mma_wait(0, deps=[b_qs, b_dk, b_v])
        b_do = (s_do.load(left).to(gl.float32) * smem.column(from_h, r, left)).to(dtype)
        b_dq = warpgroup_mma(b_do, s_s.permute((1, 0)), b_dq, is_async=True)
        smem.store_row_sums(query_h, r, b_qs * s_do.load(narrow).to(gl.float32) * smem.column(from_h, r, narrow))
        hopper.barrier()
        hopper.store_rows(dv + (first * HV + i_r * R + r) * V, s_dv, HV * V, rows, W)
        b_dq, b_do = warpgroup_mma_wait(0, deps=[b_dq, b_do])
    hopper.barrier()
    s_p.store(sum_dp.to(dtype))
    fence_async_shared()
    hopper.barrier()
    b_dq = warpgroup_mma(s_p, s_k, b_dq, is_async=True)
    b_dk = warpgroup_mma(s_p.permute((1, 0)), s_q, b_dk, is_async=True)
    # b_end: gradient through the state that passes the whole chunk, which all of the chunk's decays scale. It is added
    # at the last token; the reverse sum then adds it to the gradients of all other decays
    by_head: gl.constexpr = smem.head_rows(W)
    b_end = (
        gl.sum(smem.as_matrix(end_h, R, K).load(by_head), 1)[:, None]
        * smem.as_matrix(from_h, R, BT).load(by_head)
        / scale
    )
    b_last = gl.where(gl.arange(0, BT, gl.SliceLayout(0, by_head))[None, :] == BT - 1, b_end, 0.0)
    b_column, b_later = smem.gather(column_h), smem.gather(key_h)
    o_h = gl.arange(0, R, gl.SliceLayout(1, by_head))
    if dt is not None:
        o_t = gl.arange(0, BT, gl.SliceLayout(0, by_head))[None, :]
        p_ddt = ddt + first * HV + i_r * R + o_t.to(gl.int64) * HV + o_h[:, None]
        gl.store(p_ddt, b_column + b_later + smem.gather(own_h), mask=o_t < rows)
        b_delta = smem.as_matrix(dt_h, R, BT).load(by_head)
        b_column, b_later = b_column * b_delta, b_later * b_delta
    if skip is not None:
        gl.store(dskip + i_c.to(gl.int64) * HV + i_r * R + o_h, gl.sum(smem.gather(skip_h), 1))
    smem.as_matrix(b_h, R, BT).store(smem.gather(row_h) - b_column + smem.gather(query_h) + b_last)
    smem.as_matrix(to_h, R, BT).store(b_later)
    hopper.barrier()
    smem.store_decay_gradients(dg + first * HV + i_r * R, HV, rows, b_h, to_h)
    b_dq, b_dk = warpgroup_mma_wait(0, deps=[b_dq, b_dk])
    hopper.barrier()
    s_q.store(b_dq.to(dtype))
    s_k.store(b_dk.to(dtype))
    hopper.barrier()
    hopper.store_rows(dq + (first * parts + i_r) * K, s_q, parts * K, rows, W)
    hopper.store_rows(dk + (first * parts + i_r) * K, s_k, parts * K, rows, W)
