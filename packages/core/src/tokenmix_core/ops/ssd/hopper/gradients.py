"""SSD gradients of a chunk on Hopper: one program per chunk and value head; `backward_grouped` takes several heads.

    cp.async q k v dO S (D) ─ wait ─► Q Kᵀ, dO Vᵀ ─► P, dP ─► dQ, dV, dK ─► epilogue through smem: dq dv dk dg ddt

There is no loop, so each tile has one buffer; results reuse the buffers of operands. S is the state before the chunk, D
the gradient of the state after it; the other letters are those of README.md.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tokenmix_core.chunking import chunk_slots, num_sequences
from tokenmix_core.kernels.gluon import hopper
from tokenmix_core.kernels.gluon.hopper import LOG2_E, LOWEST
from tokenmix_core.kernels.launch.launcher import cached_launch
from tokenmix_core.ops.ssd.hopper.backward_grouped import group_gradients_kernel
from tokenmix_core.ops.ssd.hopper.smem_vectors import multiply
from tokenmix_core.ops.ssd.tuning import SSDHopper
from tokenmix_core.ops.ssd.types import Gradients, Inputs

CHUNK = gl.constexpr(64)


@gluon.jit
def dot_rows(b_x, s_y, row: gl.constexpr, D: gl.constexpr):
    """Return ⟨x_i, y_i⟩ for every row i, with X in registers (`b_x`) and Y in shared memory (`s_y`)."""
    return gl.convert_layout(
        gl.sum(b_x * s_y.load(hopper.mma_layout_split_n(D, gl.num_warps())).to(gl.float32), 1), row
    )


@gluon.jit
def scaled_rows(s_x, x_i, layout: gl.constexpr):
    """Return the tile X, which is in shared memory, with row i multiplied by x_i, rounded to 16 bits."""
    b_x = s_x.load(layout).to(gl.float32)
    return (b_x * gl.convert_layout(x_i, gl.SliceLayout(1, layout))[:, None]).to(s_x.dtype)


@gluon.jit
def load_decay(p_g, stride, rows):
    """Load a chunk's decays as base-2 logarithms, at least LOWEST; rows from `rows` on get 0, which is no decay."""
    o_t = gl.arange(0, 64, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    return gl.maximum(gl.load(p_g + o_t * stride, mask=o_t < rows, other=0.0).to(gl.float32) * LOG2_E, LOWEST)


@gluon.jit
def cumulative_decay(g_j, o_i, o_j):
    """Return cumulative log2 decays in the row layout, and their last, given log2 decays `g_j` in the column layout."""
    b_i = gl.sum(gl.where(o_i[:, None] >= o_j[None, :], g_j[None, :], 0.0), 1)
    return b_i, gl.sum(gl.where(o_i == 63, b_i, 0.0), 0)


@cached_launch
@gluon.jit(do_not_specialize=["T", "N", "G", "HV"])
def hopper_gradients_kernel(
    q, k, v, do, g, dt, skip, states, dstates, dq, dk, dv, dg, ddt, dskip, cu_seqlens,
    stride_q, stride_k, stride_v, stride_do, scale, T, N, G, HV,
    K: gl.constexpr, V: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """Compute all gradients of a chunk and value head; strides between tokens are in units of 16 bytes.

    Names that end in `_i` are vectors over a tile's rows, names that end in `_j` vectors over its columns.
    """
    BT: gl.constexpr = CHUNK
    W: gl.constexpr = gl.num_warps()
    dtype: gl.constexpr = q.dtype.element_ty
    square: gl.constexpr = hopper.mma_layout_split_n(BT, W)
    row: gl.constexpr = gl.SliceLayout(1, square)
    col: gl.constexpr = gl.SliceLayout(0, square)
    left: gl.constexpr = gl.DotOperandLayout(0, hopper.mma_layout_split_n(K, W), 2)
    # the layout in which S and D are loaded for ⟨S, D⟩: in the layout of the copies to shared memory, the compiler
    # would hold the copies' addresses in registers from here on
    lines: gl.constexpr = gl.BlockedLayout([1, 8], [512 // V, V // 16], [W // 2, 2], [1, 0])
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    i_c, i_h = gl.program_id(0) // HV, gl.program_id(0) % HV
    _, begin, length, start = hopper.locate_chunk(i_c, T, BT, N, cu_seqlens, PACKED, W)
    if start >= length:
        return
    first, rows = begin + start, length - start
    # strides come in units of 8 elements, which tells the compiler that rows are 16-byte aligned
    stride_q, stride_k, stride_v, stride_do = stride_q * 8, stride_k * 8, stride_v * 8, stride_do * 8
    i_g = i_h // (HV // G)

    # if S and D do not both fit in shared memory, D reuses S's buffer
    OVERLAY: gl.constexpr = K * V > 128 * 64
    # if K = V, store dQ early, through dO's buffer: dV and dK need the registers that hold dQ
    STORE_DQ_FIRST: gl.constexpr = K == V
    s_q = gl.allocate_shared_memory(dtype, [BT, K], shared)
    s_k = gl.allocate_shared_memory(dtype, [BT, K], shared)
    s_v = gl.allocate_shared_memory(dtype, [BT, V], shared)
    s_do = gl.allocate_shared_memory(dtype, [BT, V], shared)
    s_s = gl.allocate_shared_memory(dtype, [K, V], shared)
    s_d = s_s if OVERLAY else gl.allocate_shared_memory(dtype, [K, V], shared)
    # the buffer of P and, after that, of dP
    s_p = gl.allocate_shared_memory(dtype, [BT, BT], shared)
    o_i, o_j = gl.arange(0, BT, row), gl.arange(0, BT, col)
    o_lk, o_lv = gl.arange(0, K, gl.SliceLayout(1, lines)), gl.arange(0, V, gl.SliceLayout(0, lines))
    o_out = (first * HV + i_h) * K
    o_s = (i_c.to(gl.int64) * HV + i_h) * K * V
    hopper.async_copy_rows(s_q, q + first * stride_q + i_g * K, stride_q, rows, W)
    hopper.async_copy_rows(s_k, k + first * stride_k + i_g * K, stride_k, rows, W)
    hopper.async_copy_rows(s_v, v + first * stride_v + i_h * V, stride_v, rows, W)
    hopper.async_copy_rows(s_do, do + first * stride_do + i_h * V, stride_do, rows, W)
    hopper.async_copy_rows(s_s, states + o_s, V, K, W)
    if not OVERLAY:
        hopper.async_copy_rows(s_d, dstates + o_s, V, K, W)
    async_copy.commit_group()
    if OVERLAY:
        b_d = gl.load(dstates + o_s + o_lk[:, None] * V + o_lv[None, :])
    b_g = load_decay(g + first * HV + i_h, HV, rows)
    b_i, total = cumulative_decay(gl.convert_layout(b_g, col), o_i, o_j)
    b_j = gl.convert_layout(b_i, col)
    from_i, to_i = gl.exp2(b_i) * scale, gl.exp2(total - b_i)
    if dt is not None:
        dt_i = gl.load(dt + (first + o_i) * HV + i_h, mask=o_i < rows, other=0.0).to(gl.float32)
        dt_j = gl.convert_layout(dt_i, col)
    hopper.wait_async_copies(0)
    if not OVERLAY:
        b_d = s_d.load(lines)
    end = gl.sum(gl.sum(s_s.load(lines).to(gl.float32) * b_d.to(gl.float32), 1), 0)

    # P, dP and M (see README.md)
    b_dp, b_qk = multiply(s_do, s_v.permute((1, 0)), BT), multiply(s_q, s_k.permute((1, 0)), BT)
    b_gamma = hopper.causal_decay(b_i, b_j, o_i, o_j) * scale
    b_dp, b_qk = warpgroup_mma_wait(0, deps=[b_dp, b_qk])
    own = o_i[:, None] == o_j[None, :]
    if skip is not None:
        gl.store(dskip + i_c.to(gl.int64) * HV + i_h, gl.sum(gl.sum(gl.where(own, b_dp, 0.0), 1), 0))
    b_dp *= b_gamma
    b_m = gl.where(o_i[:, None] > o_j[None, :], b_qk * b_dp, 0.0)
    column_i = gl.convert_layout(gl.sum(b_m, 0), row)
    b_p = b_qk * b_gamma
    if dt is None:
        crossing_i = gl.sum(b_m, 1) - column_i
    else:
        # one part of the gradient of Δ: the column sums of M without the factor Δ, plus the terms of the diagonal
        ddt_i = column_i + gl.sum(gl.where(own, b_qk * b_dp, 0.0), 1)
        crossing_i = gl.sum(b_m * dt_j[None, :], 1) - dt_i * column_i
        b_p, b_dp = b_p * dt_j[None, :], b_dp * dt_j[None, :]
    if skip is not None:
        b_p = gl.where(own, b_p + gl.load(skip + i_h).to(gl.float32), b_p)
    s_p.store(b_p.to(dtype))
    b_dp = b_dp.to(dtype)
    fence_async_shared()
    hopper.barrier()

    # dQ = scale e^b dO Sᵀ + dP K; dV = Pᵀ dO + e^(b_C − b) K D, this term times Δ if given; b: cumulative decays,
    # b_C: the last b, D: gradient of the state after the chunk
    b_dq = multiply(s_do, s_s.permute((1, 0)), K)
    b_dq = warpgroup_mma_wait(0, deps=[b_dq])
    b_dq *= gl.convert_layout(from_i, gl.SliceLayout(1, hopper.mma_layout_split_n(K, W)))[:, None]
    crossing_i += dot_rows(b_dq, s_q, row, K)
    if OVERLAY:
        hopper.barrier()
        hopper.async_copy_rows(s_d, dstates + o_s, V, K, W)
        async_copy.commit_group()
    b_dv = multiply(s_p.permute((1, 0)), s_do, V)
    b_dv = warpgroup_mma_wait(0, deps=[b_dv])
    hopper.barrier()
    s_p.store(b_dp)
    fence_async_shared()
    hopper.barrier()
    b_dq = warpgroup_mma(s_p, s_k, b_dq, is_async=True)
    b_dq = warpgroup_mma_wait(0, deps=[b_dq])
    if STORE_DQ_FIRST:
        s_do.store(b_dq.to(dtype))
        hopper.barrier()
        hopper.store_rows(dq + o_out, s_do, HV * K, rows, W)
    if OVERLAY:
        hopper.wait_async_copies(0)
    b_kd = multiply(s_k, s_d, V)
    b_kd = warpgroup_mma_wait(0, deps=[b_kd])
    b_kd *= gl.convert_layout(to_i, gl.SliceLayout(1, hopper.mma_layout_split_n(V, W)))[:, None]
    later_i = dot_rows(b_kd, s_v, row, V)
    if dt is not None:
        gl.store(ddt + (first + o_i) * HV + i_h, ddt_i + later_i, mask=o_i < rows)
        later_i, to_i = later_i * dt_i, to_i * dt_i
        b_kd *= gl.convert_layout(dt_i, gl.SliceLayout(1, hopper.mma_layout_split_n(V, W)))[:, None]
    b_dv += b_kd
    hopper.barrier()
    s_do.store(b_dv.to(dtype))
    # dK = dPᵀ Q + e^(b_C − b) V Dᵀ
    b_dk = multiply(s_p.permute((1, 0)), s_q, K)
    b_left = scaled_rows(s_v, to_i, left)
    b_dk = warpgroup_mma(b_left, s_d.permute((1, 0)), b_dk, is_async=True)
    hopper.store_rows(dv + (first * HV + i_h) * V, s_do, HV * V, rows, W)
    b_paths = gl.where(
        o_i[:, None] <= o_j[None, :],
        gl.convert_layout(crossing_i, col)[None, :],
        gl.convert_layout(later_i, col)[None, :],
    )
    dg_i = gl.sum(b_paths, 1) + end * gl.exp2(total)
    gl.store(dg + (first + o_i) * HV + i_h, dg_i, mask=o_i < rows)
    b_dk, b_left = warpgroup_mma_wait(0, deps=[b_dk, b_left])
    hopper.barrier()
    if not STORE_DQ_FIRST:
        s_q.store(b_dq.to(dtype))
        hopper.store_rows(dq + o_out, s_q, HV * K, rows, W)
    s_k.store(b_dk.to(dtype))
    hopper.store_rows(dk + o_out, s_k, HV * K, rows, W)


def hopper_gradients(x: Inputs, *, do: Tensor, states: Tensor, dstates: Tensor, config: SSDHopper) -> Gradients:
    """Return all gradients except the initial state's; those of g, Δ and D are float32.

    dq and dk `[B, T, HV / heads, K]` are sums over `config.heads` value heads.
    """
    B, T, G, K = x.q.shape
    HV, V = x.v.shape[2:]
    parts, slots = HV // config.heads, chunk_slots(B, T, 64, x.cu_seqlens)
    dq, dk = (torch.empty((B, T, parts, K), dtype=x.q.dtype, device=x.q.device) for _ in range(2))
    dv = torch.empty_like(x.v, memory_format=torch.contiguous_format)
    dg = torch.empty(x.g.shape, dtype=torch.float32, device=x.g.device)
    ddt = None if x.dt is None else torch.empty_like(dg)
    # zeros, because in a packed batch some entries belong to no chunk and no program writes them
    dskip = None if x.D is None else torch.zeros(slots, HV, dtype=torch.float32, device=x.q.device)
    stride_q, stride_k, stride_v, stride_do = (y.stride(1) // 8 for y in (x.q, x.k, x.v, do))
    arguments = dict(
        q=x.q, k=x.k, v=x.v, do=do, g=x.g, dt=x.dt, skip=x.D, states=states, dstates=dstates, dq=dq, dk=dk, dv=dv,
        dg=dg, ddt=ddt, dskip=dskip, cu_seqlens=x.cu_seqlens, stride_q=stride_q, stride_k=stride_k, stride_v=stride_v,
        stride_do=stride_do, scale=x.scale, T=T, N=num_sequences(x.q, x.cu_seqlens), G=G, HV=HV, K=K, V=V,
        PACKED=x.cu_seqlens is not None, num_warps=config.num_warps,
    )  # fmt: skip
    if config.heads == 1:
        hopper_gradients_kernel[(slots * parts,)](**arguments)
    else:
        group_gradients_kernel[(slots * parts,)](R=config.heads, **arguments)
    return Gradients(q=dq, k=dk, v=dv, g=dg, dt=ddt, D=None if dskip is None else dskip.sum(0))
