"""`gradients` on Hopper for large groups: a chunk and R value heads of one group a program, which sums their dq and dk.

What all heads of the group share leaves the loop over them: Σ dQ = Σ_h diag(scale e^b_h) dO_h S_hᵀ + (Σ_h dP_h) K, and
so for dK. Sums that dg needs stay apart, by warp or warp group, until all heads are done: no warp waits for another's.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tokenmix_core.ops.ssd.hopper.decay import LOG2_E, LOWEST
from tokenmix_core.ops.ssd.hopper.products import multiply, product
from tokenmix_core.tile.hopper import (
    await_copies,
    barrier,
    causal_decay,
    fetch_rows,
    locate_chunk,
    row_layout,
    store_rows,
)
from tokenmix_core.tile.launch import cached_launch

CHUNK = gl.constexpr(64)


@gluon.jit
def add(x, y):
    return x + y


@gluon.constexpr_function
def head_rows(warps):
    """`[R, 64]`: a head's vector a warp."""
    return gl.BlockedLayout([1, 2], [1, 32], [warps, 1], [1, 0])


@gluon.jit
def allocate_vectors(R: gl.constexpr, C: gl.constexpr):
    """A vector of C elements for each head."""
    return gl.allocate_shared_memory(gl.float32, [R, C], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def allocate_parts(R: gl.constexpr, P: gl.constexpr):
    """A vector of a chunk for each head, in P parts to be summed."""
    return gl.allocate_shared_memory(gl.float32, [R, P, 64], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))


@gluon.jit
def as_matrix(x_h, R: gl.constexpr, C: gl.constexpr):
    """The vectors of all heads as rows."""
    return x_h._reinterpret(gl.float32, [R, C], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))


@gluon.jit
def prepare_decays(b_h, from_h, to_h, p_g, HV, rows, scale, R: gl.constexpr):
    """Each head's sums of decays b, and `scale e^b` and `e^(b_C − b)`."""
    layout: gl.constexpr = head_rows(gl.num_warps())
    o_h = gl.arange(0, R, gl.SliceLayout(1, layout))[:, None]
    o_t = gl.arange(0, 64, gl.SliceLayout(0, layout))[None, :]
    b_g = gl.load(p_g + o_t.to(gl.int64) * HV + o_h, mask=o_t < rows, other=0.0)
    b_g = gl.maximum(b_g.to(gl.float32) * LOG2_E, LOWEST)
    b_b = gl.associative_scan(b_g, 1, add)
    as_matrix(b_h, R, 64).store(b_b)
    as_matrix(from_h, R, 64).store(gl.exp2(b_b) * scale)
    as_matrix(to_h, R, 64).store(gl.exp2(gl.sum(b_g, 1)[:, None] - b_b))


@gluon.jit
def column(x_h, r, layout: gl.constexpr):
    """A head's vector as a column."""
    return x_h.index(r).load(gl.SliceLayout(1, layout))[:, None]


@gluon.jit
def store_row_sums(x_h, r, b_x):
    """Each row's sum over a warp group's columns."""
    P: gl.constexpr = x_h.shape[1]
    x_h.index(r).permute((1, 0)).store(gl.sum(b_x.reshape([b_x.shape[0], P, b_x.shape[1] // P]), 2))


@gluon.jit
def gather(x_h):
    """The sum of all warps' parts, `[R, 64]`."""
    R: gl.constexpr = x_h.shape[0]
    P: gl.constexpr = x_h.shape[1]
    b_x = as_matrix(x_h, R, P * 64).load(head_rows(gl.num_warps()))
    return gl.convert_layout(gl.sum(b_x.reshape([R, P, 64]), 1), head_rows(gl.num_warps()))


@gluon.jit
def store_decay_gradients(p_dg, HV, rows, crossing_h, later_h):
    """dg_t = Σ_{i ≥ t} crossing_i + Σ_{j < t} later_j of each head."""
    layout: gl.constexpr = gl.BlockedLayout([1, 16], [8, 4], [gl.num_warps(), 1], [1, 0])
    col: gl.constexpr = gl.SliceLayout(0, layout)
    o_i, o_j = gl.arange(0, 64, gl.SliceLayout(1, layout)), gl.arange(0, 64, col)
    for r in range(crossing_h.shape[0]):
        crossing_j, later_j = crossing_h.index(r).load(col), later_h.index(r).load(col)
        dg_i = gl.sum(gl.where(o_i[:, None] <= o_j[None, :], crossing_j[None, :], later_j[None, :]), 1)
        gl.store(p_dg + o_i.to(gl.int64) * HV + r, dg_i, mask=o_i < rows)


@cached_launch
@gluon.jit(do_not_specialize=["T", "N", "G", "HV"])
def group_gradients_kernel(
    q, k, v, do, g, states, gradients, dq, dk, dv, dg, cu_seqlens,
    stride_q, stride_k, stride_v, stride_do, scale, T, N, G, HV,
    K: gl.constexpr, V: gl.constexpr, R: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """Vectors by row are `x_i`, by column `x_j`, of all heads in shared memory `x_h`; strides count 16 bytes."""
    BT: gl.constexpr = CHUNK
    W: gl.constexpr = gl.num_warps()
    dtype: gl.constexpr = q.dtype.element_ty
    square: gl.constexpr = product(BT, W)
    wide: gl.constexpr = product(K, W)
    narrow: gl.constexpr = product(V, W)
    left: gl.constexpr = gl.DotOperandLayout(0, wide, 2)
    lines: gl.constexpr = row_layout(V, W)
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    parts = HV // R
    i_c, i_r = gl.program_id(0) // parts, gl.program_id(0) % parts
    _, begin, length, start = locate_chunk(i_c, T, BT, N, cu_seqlens, PACKED, W)
    if start >= length:
        return
    first, rows = begin + start, length - start
    # rows begin at multiples of 16 bytes
    stride_q, stride_k, stride_v, stride_do = stride_q * 8, stride_k * 8, stride_v * 8, stride_do * 8
    i_g = i_r * R // (HV // G)

    s_q = gl.allocate_shared_memory(dtype, [BT, K], shared)
    s_k = gl.allocate_shared_memory(dtype, [BT, K], shared)
    v_2 = gl.allocate_shared_memory(dtype, [2, BT, V], shared)
    do_2 = gl.allocate_shared_memory(dtype, [2, BT, V], shared)
    s_2 = gl.allocate_shared_memory(dtype, [2, K, V], shared)
    d_2 = gl.allocate_shared_memory(dtype, [2, K, V], shared)
    s_p = gl.allocate_shared_memory(dtype, [BT, BT], shared)
    # dV takes P's place
    s_dv = s_p if V == BT else gl.allocate_shared_memory(dtype, [BT, V], shared)
    b_h, from_h, to_h = allocate_vectors(R, BT), allocate_vectors(R, BT), allocate_vectors(R, BT)
    row_h, query_h, key_h = allocate_parts(R, W // 4), allocate_parts(R, W // 4), allocate_parts(R, W // 4)
    column_h, end_h = allocate_parts(R, 4), allocate_vectors(R, K)
    o_s = (i_c.to(gl.int64) * HV + i_r * R) * K * V
    p_v, p_do = v + first * stride_v + i_r * R * V, do + first * stride_do + i_r * R * V
    fetch_rows(s_q, q + first * stride_q + i_g * K, stride_q, rows, W)
    fetch_rows(s_k, k + first * stride_k + i_g * K, stride_k, rows, W)
    fetch_rows(v_2.index(0), p_v, stride_v, rows, W)
    fetch_rows(do_2.index(0), p_do, stride_do, rows, W)
    fetch_rows(s_2.index(0), states + o_s, V, K, W)
    fetch_rows(d_2.index(0), gradients + o_s, V, K, W)
    async_copy.commit_group()
    prepare_decays(b_h, from_h, to_h, g + first * HV + i_r * R, HV, rows, scale, R)
    o_i, o_j = gl.arange(0, BT, gl.SliceLayout(1, square)), gl.arange(0, BT, gl.SliceLayout(0, square))
    b_dq, b_dk = gl.zeros([BT, K], gl.float32, wide), gl.zeros([BT, K], gl.float32, wide)
    sum_dp = gl.zeros([BT, BT], gl.float32, square)
    for r in range(R):
        here, then = r % 2, (r + 1) % 2
        s_v, s_do, s_s, s_d = v_2.index(here), do_2.index(here), s_2.index(here), d_2.index(here)
        await_copies(0)
        if r + 1 < R:
            p_v, p_do, o_s = p_v + V, p_do + V, o_s + K * V
            fetch_rows(v_2.index(then), p_v, stride_v, rows, W)
            fetch_rows(do_2.index(then), p_do, stride_do, rows, W)
            fetch_rows(s_2.index(then), states + o_s, V, K, W)
            fetch_rows(d_2.index(then), gradients + o_s, V, K, W)
            async_copy.commit_group()
        end_h.index(r).store(gl.sum(s_s.load(lines).to(gl.float32) * s_d.load(lines).to(gl.float32), 1))
        b_j = b_h.index(r).load(gl.SliceLayout(0, square))
        b_gamma = causal_decay(b_h.index(r).load(gl.SliceLayout(1, square)), b_j, o_i, o_j) * scale

        # P, dP and M = P ⊙ dP, whose sums by row and column are paths inside the chunk
        b_qk, b_dp = multiply(s_q, s_k.permute((1, 0)), BT), multiply(s_do, s_v.permute((1, 0)), BT)
        b_kd = multiply(s_k, s_d, V)
        b_qk, b_dp = warpgroup_mma_wait(1, deps=[b_qk, b_dp])
        b_dp *= b_gamma
        s_p.store((b_qk * b_gamma).to(dtype))
        b_m = gl.where(o_i[:, None] > o_j[None, :], b_qk * b_dp, 0.0)
        column_h.index(r).store(gl.sum(b_m.reshape([4, BT // 4, BT]), 1))
        store_row_sums(row_h, r, b_m)
        sum_dp += b_dp
        fence_async_shared()
        barrier()

        # dV = Pᵀ dO + e^(b_C − b) K D; dK += e^(b_C − b) V Dᵀ
        b_kd = warpgroup_mma_wait(0, deps=[b_kd])
        b_kd *= column(to_h, r, narrow)
        store_row_sums(key_h, r, b_kd * s_v.load(narrow).to(gl.float32))
        b_dv = warpgroup_mma(s_p.permute((1, 0)), s_do, b_kd, is_async=True)
        b_v = (s_v.load(left).to(gl.float32) * column(to_h, r, left)).to(dtype)
        b_dk = warpgroup_mma(b_v, s_d.permute((1, 0)), b_dk, is_async=True)
        b_dv = warpgroup_mma_wait(1, deps=[b_dv])
        barrier()
        s_dv.store(b_dv.to(dtype))

        # dQ += scale e^b dO Sᵀ, and q_i · S do_i
        b_qs = multiply(s_q, s_s, V)
        b_qs, b_dk, b_v = warpgroup_mma_wait(0, deps=[b_qs, b_dk, b_v])
        b_do = (s_do.load(left).to(gl.float32) * column(from_h, r, left)).to(dtype)
        b_dq = warpgroup_mma(b_do, s_s.permute((1, 0)), b_dq, is_async=True)
        store_row_sums(query_h, r, b_qs * s_do.load(narrow).to(gl.float32) * column(from_h, r, narrow))
        barrier()
        store_rows(dv + (first * HV + i_r * R + r) * V, s_dv, HV * V, rows, W)
        b_dq, b_do = warpgroup_mma_wait(0, deps=[b_dq, b_do])
    barrier()
    s_p.store(sum_dp.to(dtype))
    fence_async_shared()
    barrier()
    b_dq = warpgroup_mma(s_p, s_k, b_dq, is_async=True)
    b_dk = warpgroup_mma(s_p.permute((1, 0)), s_q, b_dk, is_async=True)
    # what crosses the whole chunk crosses its last decay, as all others
    by_head: gl.constexpr = head_rows(W)
    b_end = gl.sum(as_matrix(end_h, R, K).load(by_head), 1)[:, None] * as_matrix(from_h, R, BT).load(by_head) / scale
    b_last = gl.where(gl.arange(0, BT, gl.SliceLayout(0, by_head))[None, :] == BT - 1, b_end, 0.0)
    as_matrix(b_h, R, BT).store(gather(row_h) - gather(column_h) + gather(query_h) + b_last)
    as_matrix(to_h, R, BT).store(gather(key_h))
    barrier()
    store_decay_gradients(dg + first * HV + i_r * R, HV, rows, b_h, to_h)
    b_dq, b_dk = warpgroup_mma_wait(0, deps=[b_dq, b_dk])
    barrier()
    s_q.store(b_dq.to(dtype))
    s_k.store(b_dk.to(dtype))
    barrier()
    store_rows(dq + (first * parts + i_r) * K, s_q, parts * K, rows, W)
    store_rows(dk + (first * parts + i_r) * K, s_k, parts * K, rows, W)
