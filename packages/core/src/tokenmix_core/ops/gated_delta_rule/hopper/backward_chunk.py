"""`backward_chunk` on Hopper: all gradients but the state's and the values' of one chunk and value head a program."""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from tokenmix_core.ops.gated_delta_rule.hopper.gates import load_gate
from tokenmix_core.ops.gated_delta_rule.layout import CHUNK, SIZES, chunk_slots, sequences
from tokenmix_core.tile.hopper import causal_decay, fetch_rows, locate_chunk, product_layout, row_layout, store_rows
from tokenmix_core.tile.launch import cached_launch

LOG2_E = gl.constexpr(1.4426950408889634)
LOWEST = gl.constexpr(-160.0)


@gluon.jit
def column_gates(p_gates, rows, col: gl.constexpr):
    """b, β r and β by column: 16 registers each, so that they are loaded anew where they are needed again."""
    return load_gate(p_gates, rows, col), load_gate(p_gates + 1, rows, col), load_gate(p_gates + 3, rows, col)


@gluon.jit
def multiply(a, b, N: gl.constexpr):
    """Begin A B."""
    zero = gl.zeros([64, N], gl.float32, product_layout(N, 4))
    return warpgroup_mma(a, b, zero, use_acc=False, is_async=True)


@gluon.jit
def square(s_x, D: gl.constexpr):
    """Room for a tile `[64, 64]` in that of one `[64, D]`."""
    return s_x._reinterpret(s_x.dtype, [D // 64, 64, 64], gl.NVMMASharedLayout(128, 16)).index(0)


@gluon.jit
def scale_rows(b_x, x_i, D: gl.constexpr):
    """diag(x) X."""
    return b_x * gl.convert_layout(x_i, gl.SliceLayout(1, product_layout(D, 4)))[:, None]


@gluon.jit
def dot_rows(b_x, s_y, row: gl.constexpr, D: gl.constexpr):
    """Σ x y of each row of X in registers and Y in shared memory."""
    return gl.convert_layout(gl.sum(b_x * s_y.load(product_layout(D, 4)).to(gl.float32), 1), row)


@gluon.jit
def unnormalise(b_dx, s_x, r_i, dot_i, D: gl.constexpr):
    """The gradient of x from that of x̂ = r x with r = (Σ x² + ε)^−½: r (dx̂ − x̂ (x̂ · dx̂))."""
    return scale_rows(b_dx - scale_rows(s_x.load(product_layout(D, 4)).to(gl.float32), r_i * dot_i, D), r_i, D)


@gluon.jit
def dot_tiles(s_x, s_y, D: gl.constexpr):
    """Σ x y over two matrices `[D, D]`."""
    layout: gl.constexpr = row_layout(D, 4)
    b_sum = gl.zeros([16, D], gl.float32, layout)
    for i in gl.static_range(D // 16):
        b_sum += s_x.slice(i * 16, 16).load(layout).to(gl.float32) * s_y.slice(i * 16, 16).load(layout).to(gl.float32)
    return gl.sum(gl.sum(b_sum, 1), 0)


@cached_launch
@gluon.jit(do_not_specialize=SIZES)
def backward_chunk_kernel(
    q, k, g, gates, cu_seqlens, do, dv, residual, states, dstates, dq, dk, dg, dbeta,
    scale, T, N, H, group, tokens,
    D: gl.constexpr, BT: gl.constexpr, L2NORM: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """Tiles of 64 rows by D = K = V. Vectors by row are `x_i`, by column `x_j`.

    What meets K and Q transposed, Eᵀ and Fᵀ, is read from shared memory so; no result is transposed on its way there.
    """
    dtype: gl.constexpr = q.dtype.element_ty
    row: gl.constexpr = gl.SliceLayout(1, product_layout(BT, 4))
    col: gl.constexpr = gl.SliceLayout(0, product_layout(BT, 4))
    left: gl.constexpr = gl.DotOperandLayout(0, product_layout(D, 4), 2)
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    i_slot, i_hv = gl.program_id(0), gl.program_id(1)
    _, begin, length, start = locate_chunk(i_slot, T, BT, N, cu_seqlens, PACKED, 4)
    if start >= length:
        return
    first, rows = begin + start, length - start
    HV = H * group
    o_qk, o_vo, stride = (first * H + i_hv // group) * D, (first * HV + i_hv) * D, HV * D
    o_s = (i_slot.to(gl.int64) * HV + i_hv) * D * D

    # Eᵀ takes the place of dO, dS then that of both and Q's, and Fᵀ that of dY
    s_k = gl.allocate_shared_memory(dtype, [BT, D], shared)
    s_r = gl.allocate_shared_memory(dtype, [BT, D], shared)
    s_dy = gl.allocate_shared_memory(dtype, [BT, D], shared)
    s_state = gl.allocate_shared_memory(dtype, [D, D], shared)
    s_qdo = gl.allocate_shared_memory(dtype, [2 * BT, D], shared)
    s_q, s_do, s_ds = s_qdo.slice(0, BT), s_qdo.slice(BT, BT), s_qdo.slice(0, D)
    s_e, s_f = square(s_do, D), square(s_dy, D)
    fetch_rows(s_q, q + o_qk, H * D, rows, 4)
    fetch_rows(s_k, k + o_qk, H * D, rows, 4)
    fetch_rows(s_do, do + o_vo, stride, rows, 4)
    fetch_rows(s_r, residual + o_vo, stride, rows, 4)
    async_copy.commit_group()
    fetch_rows(s_state, states + o_s, D, D, 4)
    fetch_rows(s_dy, dv + o_vo, stride, rows, 4)
    async_copy.commit_group()

    p_gates = gates + (i_hv.to(gl.int64) * tokens + first) * 4
    b_i, last = load_gate(p_gates, rows, row), gl.load(p_gates + (gl.minimum(rows, BT) - 1) * 4)
    r_i, beta_i = load_gate(p_gates + 2, rows, row), load_gate(p_gates + 3, rows, row)
    o_i, o_j = gl.arange(0, BT, row), gl.arange(0, BT, col)

    # E = scale dO Rᵀ ⊙ Γ; sums over tokens, in float32, for dβ and the product q̂ · dq̂
    async_copy.wait_group(1)
    rq_i = gl.full([BT], 1.0, gl.float32, row)
    if L2NORM:
        rq_i = gl.rsqrt(dot_rows(s_q.load(product_layout(D, 4)).to(gl.float32), s_q, row, D) + 1e-6)
    b_e, b_qk = multiply(s_do, s_r.permute((1, 0)), BT), multiply(s_q, s_k.permute((1, 0)), BT)
    b_j, w_j, beta_j = column_gates(p_gates, rows, col)
    b_e, b_qk = warpgroup_mma_wait(0, deps=[b_e, b_qk])
    b_e *= causal_decay(b_i, b_j, o_i, o_j) * scale
    b_qk *= b_e * rq_i[:, None]
    dot_i = gl.sum(b_qk * w_j[None, :], 1)
    dbeta_i = gl.convert_layout(gl.sum(b_qk, 0), row)
    b_et = (b_e * beta_j[None, :] * rq_i[:, None]).to(dtype)
    b_e = gl.convert_layout((b_e * w_j[None, :]).to(dtype), left)

    # dQ = scale γ dO Sᵀ + (E β) K̂
    async_copy.wait_group(0)
    b_dq = multiply(s_do, s_state.permute((1, 0)), D)
    b_dq = scale_rows(warpgroup_mma_wait(0, deps=[b_dq]), gl.exp2(b_i) * scale, D)
    dot_i += dot_rows(b_dq, s_q, row, D) * rq_i
    b_dq = warpgroup_mma(b_e, s_k, b_dq, is_async=True)
    b_dq, b_e = warpgroup_mma_wait(0, deps=[b_dq, b_e])
    if L2NORM:
        b_dq = unnormalise(b_dq, s_q, rq_i, dot_i, D)
    s_do.store(b_dq.to(dtype))
    store_rows(dq + o_vo, s_do, stride, rows, 4)

    # of dK the parts (β Eᵀ) Q̂ and −γ dY Sᵀ
    s_e.store(b_et)
    fence_async_shared()
    b_dk, b_dks = multiply(s_e.permute((1, 0)), s_q, D), multiply(s_dy, s_state.permute((1, 0)), D)
    b_dk, b_dks = warpgroup_mma_wait(0, deps=[b_dk, b_dks])
    fetch_rows(s_ds, dstates + o_s, D, D, 4)
    async_copy.commit_group()
    b_dks = scale_rows(b_dks, -gl.exp2(b_i), D)
    dot_k_i = dot_rows(b_dks, s_k, row, D) * r_i
    b_dk += b_dks

    # F = −dY Rᵀ ⊙ Γ strictly below the diagonal
    b_kk, b_f = multiply(s_k, s_k.permute((1, 0)), BT), multiply(s_dy, s_r.permute((1, 0)), BT)
    b_kk, b_f = warpgroup_mma_wait(0, deps=[b_kk, b_f])
    b_j, w_j, beta_j = column_gates(p_gates, rows, col)
    b_f *= -causal_decay(b_i, b_j, o_i, o_j + 1)
    b_kk *= b_f * r_i[:, None]
    dot_k_i += gl.sum(b_kk * w_j[None, :], 1)
    dbeta_i = (dbeta_i + gl.convert_layout(gl.sum(b_kk, 0), row)) * r_i
    s_f.store((b_f * beta_j[None, :] * r_i[:, None]).to(dtype))
    b_f = gl.convert_layout((b_f * w_j[None, :]).to(dtype), left)
    fence_async_shared()

    # dK += (F β + β Fᵀ) K̂ + β w R dSᵀ
    b_dk = warpgroup_mma(s_f.permute((1, 0)), s_k, b_dk, is_async=True)
    b_dk = warpgroup_mma(b_f, s_k, b_dk, is_async=True)
    b_dk, b_f = warpgroup_mma_wait(0, deps=[b_dk, b_f])
    async_copy.wait_group(0)
    b_dw = multiply(s_r, s_ds.permute((1, 0)), D)
    b_dw = scale_rows(warpgroup_mma_wait(0, deps=[b_dw]), gl.exp2(last - b_i), D)
    out_i = dot_rows(b_dw, s_k, row, D) * r_i
    b_dk += scale_rows(b_dw, beta_i, D)
    dbeta_i += out_i
    if L2NORM:
        b_dk = unnormalise(b_dk, s_k, r_i, dot_k_i + beta_i * dbeta_i, D)
    s_r.store(b_dk.to(dtype))
    store_rows(dk + o_vo, s_r, stride, rows, 4)
    end = dot_tiles(s_state, s_ds, D)

    # dg gathers all later decays of the chunk; a decay that was cut off has none
    p_t, m_t = (first + o_i) * HV + i_hv, o_i < rows
    gl.store(dbeta + p_t, dbeta_i.to(dbeta.dtype.element_ty), mask=m_t)
    db_j = gl.convert_layout(gl.where(m_t, dot_i + dot_k_i - beta_i * dbeta_i, 0.0), col)
    out_j = gl.convert_layout(out_i * beta_i, col)
    b_later = gl.where(o_i[:, None] <= o_j[None, :], db_j[None, :], 0.0) + out_j[None, :]
    dg_i = gl.sum(b_later, 1) + end * gl.exp2(last)
    g_i = gl.load(g + p_t, mask=m_t, other=0.0).to(gl.float32)
    gl.store(dg + p_t, gl.where(g_i * LOG2_E < LOWEST, 0.0, dg_i).to(dg.dtype.element_ty), mask=m_t)


def backward_chunk(
    q: Tensor,
    k: Tensor,
    g: Tensor,
    gates: Tensor,
    do: Tensor,
    dv: Tensor,
    residual: Tensor,
    states: Tensor,
    dstates: Tensor,
    cu_seqlens: Tensor | None,
    scale: float,
    qk_l2norm: bool,
    out: tuple[Tensor, Tensor, Tensor, Tensor],
) -> None:
    """Write dq and dk of each value head, dg and dβ into `out`."""
    B, T, H, D = q.shape
    HV = dv.shape[2]
    backward_chunk_kernel[(chunk_slots(q, cu_seqlens), HV)](
        q, k, g, gates, cu_seqlens, do, dv, residual, states, dstates, *out,
        scale, T, sequences(q, cu_seqlens), H, HV // H, B * T, D, CHUNK, qk_l2norm, cu_seqlens is not None,
        num_warps=4,
    )  # fmt: skip
