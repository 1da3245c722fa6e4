"""Gradients of q, k, g and β on Hopper: one program per chunk and value head.

    cp.async dO dY R Q ─┐     cp.async S K ─┐                 cp.async dS', over S ─┐
                        └► E ───────────────┴► dQ ─► store   F, dK ─────────────────┴► X ─► dK, dβ, dg ─► store

There is no loop; results and later operands reuse the buffers of earlier operands. E, F and X are terms of dQ and dK
(formulas below); R, S and the other letters are those of the op's README.md.
"""

from collections import namedtuple
from typing import Any, NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from tokenmix_core.chunking import chunk_slots, num_sequences
from tokenmix_core.kernels.gluon import hopper
from tokenmix_core.kernels.gluon.hopper import LOG2_E, LOWEST
from tokenmix_core.kernels.launch.launcher import cached_launch
from tokenmix_core.ops.gated_delta_rule.constants import CHUNK, SIZES
from tokenmix_core.ops.gated_delta_rule.hopper.gates import load_gate, range_factor
from tokenmix_core.ops.gated_delta_rule.types import Reverse, StateGradients

# gradients are divided by β only if β exceeds this bound (`nonzero`)
SMALLEST = gl.constexpr(2.0**-8)


@gluon.jit
def multiply(a, b, N: gl.constexpr):
    """Issue the WGMMA A B for 64 rows of A; return the pending accumulator."""
    zero = gl.zeros([64, N], gl.float32, hopper.mma_layout(N, 4))
    return warpgroup_mma(a, b, zero, use_acc=False, is_async=True)


@gluon.jit
def accumulate(a, b, acc):
    """Issue the WGMMA acc + A B; return the pending accumulator."""
    return warpgroup_mma(a, b, acc, is_async=True)


@gluon.jit
def scale_rows(b_x, x_i, D: gl.constexpr, WARPS: gl.constexpr = 4):
    """Return the tile X with row i multiplied by x_i: diag(x) X."""
    return b_x * gl.convert_layout(x_i, gl.SliceLayout(1, hopper.mma_layout_split_n(D, WARPS)))[:, None]


@gluon.jit
def dot_rows(b_x, s_y, row: gl.constexpr, D: gl.constexpr, WARPS: gl.constexpr = 4):
    """Return ⟨x_i, y_i⟩ for every row i, with X in registers (`b_x`) and Y in shared memory (`s_y`)."""
    return gl.convert_layout(gl.sum(b_x * s_y.load(hopper.mma_layout_split_n(D, WARPS)).to(gl.float32), 1), row)


@gluon.jit
def square(s_x, i: gl.constexpr, D: gl.constexpr):
    """Return the i-th block of 64 columns of a tile `[64, D]` in shared memory."""
    return hopper.reinterpret(s_x, s_x.dtype, [64, 64], gl.NVMMASharedLayout(128, 16), i)


@gluon.jit
def store_result(p_x, b_x, s_half, stride, rows, D: gl.constexpr):
    """Store a tile `[64, D]` at `p_x`, 64 columns at a time, through the shared-memory buffer `s_half`."""
    if D == 64:
        s_half.store(b_x)
        hopper.store_rows(p_x, s_half, stride, rows, 4)
    else:
        b_first, b_second = gl.split(b_x.reshape([64, 2, 64]).permute((0, 2, 1)))
        s_half.store(b_first)
        hopper.store_rows(p_x, s_half, stride, rows, 4)
        s_half.store(b_second)
        hopper.store_rows(p_x + 64, s_half, stride, rows, 4)


@gluon.jit
def unnormalise(b_dx, s_x, r_i, dot_i, D: gl.constexpr, WARPS: gl.constexpr = 4):
    """Return dx = r dx̂ − r x̂ (x̂ · dx̂) for x̂ = r x, r = (Σ x² + ε)^−½; `b_dx` is r dx̂, `dot_i` is x̂ · dx̂."""
    b_x = s_x.load(hopper.mma_layout_split_n(D, WARPS)).to(gl.float32)
    return b_dx - scale_rows(b_x, r_i * r_i * dot_i, D, WARPS)


@gluon.jit
def nonzero(beta_r, r):
    """Return the divisor β r of gradients, or r where β ≤ SMALLEST; r: inverse norms of the keys, β: write strength."""
    return gl.where(beta_r > SMALLEST * r, beta_r, r)


@gluon.jit
def apply_write_factor(b_x, out_i, beta_i, writes, dwrites, o_w):
    """Return `b_x` and `out_i` times the chunk's write factor and store its gradient.

    Without `writes`, return both unchanged and store nothing.

    `b_x` is the term of X through the state leaving the chunk, w R dS'ᵀ times a divisor per row, and `out_i` is that
    state's part of dβ (`GateGradients.out`). `o_w` is the factor's index in `writes`.
    """
    if writes is not None:
        factor = gl.load(writes + o_w)
        gl.store(dwrites + o_w, gl.sum(out_i * beta_i, 0))
        b_x *= factor
        out_i *= factor
    return b_x, out_i


# pointers to a chunk's g, dg and dβ, and to the partial sums of ⟨dS', S⟩
GatePointers = namedtuple("GatePointers", "g dg dbeta end")
# vectors in the layout of a tile's rows: β; the gradient of b (cumulative log2 decay) without its term −β dβ; dβ; and
# the part of dβ that comes from the state leaving the chunk
GateGradients = namedtuple("GateGradients", "beta db dbeta out")


@gluon.jit
def store_gate_gradients(p, x, stride, rows, last, V: gl.constexpr, row: gl.constexpr, WARPS: gl.constexpr):
    """Store dβ and dg; `p` are `GatePointers`, `x` are `GateGradients`.

    dg is the sum of db, the gradient of b, from the token to the chunk's end, plus the gradient of the last b; it is
    zero where the decay is clamped.
    """
    p_g, p_dg, p_dbeta, p_end = p
    beta_i, db_i, dbeta_i, out_i = x
    # in this layout every warp holds, and computes, the whole vector
    line: gl.constexpr = gl.BlockedLayout([2], [32], [WARPS], [0])
    o_i = gl.arange(0, 64, row)
    p_t, m_t = o_i * stride, o_i < rows
    gl.store(p_dbeta + p_t, dbeta_i.to(p_dbeta.dtype.element_ty), mask=m_t)
    end = gl.sum(gl.load(p_end + gl.arange(0, V, gl.BlockedLayout([4], [32], [WARPS], [0]))), 0) * gl.exp2(last)
    end += gl.sum(gl.convert_layout(out_i * beta_i, line), 0)
    db_t = gl.convert_layout(gl.where(m_t, db_i - beta_i * dbeta_i, 0.0), line)
    dg_i = gl.convert_layout(gl.associative_scan(db_t, 0, hopper.add, reverse=True) + end, row)
    g_i = gl.load(p_g + p_t, mask=m_t, other=0.0).to(gl.float32)
    gl.store(p_dg + p_t, gl.where(g_i * LOG2_E < LOWEST, 0.0, dg_i).to(p_dg.dtype.element_ty), mask=m_t)


@cached_launch
@gluon.jit(do_not_specialize=SIZES)
def backward_chunk_kernel(
    q, k, g, gates, writes, cu_seqlens, do, dv, residual, states, dstates, ends, dq, dk, dg, dbeta, dwrites,
    scale, T, N, H, group, tokens,
    K: gl.constexpr, V: gl.constexpr, BT: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """Compute dq, dk, dg, dβ and `dwrites` of a chunk and value head, in tiles of 64 rows and K or V columns.

    Vectors named `…_i` have the layout of a tile's rows, vectors named `…_j` the layout of its columns. Transposed
    operands are views of shared memory; no accumulator is transposed. x̂ · dx̂ (x: q or k) is computed from dQ and dK,
    so Q Kᵀ and K Kᵀ are not needed. E and F are rounded after all row and column factors are applied, so that the terms
    that cancel in dg have equal rounding errors. At most two accumulators are in registers at a time, to avoid spills.
    """
    dtype: gl.constexpr = q.dtype.element_ty
    RANGE: gl.constexpr = range_factor(dtype, K)
    row: gl.constexpr = gl.SliceLayout(1, hopper.mma_layout(BT, 4))
    col: gl.constexpr = gl.SliceLayout(0, hopper.mma_layout(BT, 4))
    left: gl.constexpr = gl.DotOperandLayout(0, hopper.mma_layout(K, 4), 2)
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    i_slot, i_hv = gl.program_id(0), gl.program_id(1)
    _, begin, length, start = hopper.locate_chunk(i_slot, T, BT, N, cu_seqlens, PACKED, 4)
    if start >= length:
        return
    first, rows = begin + start, length - start
    HV = H * group
    o_qk, o_vo, o_dqk = (first * H + i_hv // group) * K, (first * HV + i_hv) * V, (first * HV + i_hv) * K
    o_s = (i_slot.to(gl.int64) * HV + i_hv) * K * V

    # dO's buffer is reused for E and, if V = 128, to store dQ in halves; dY's buffer is reused for F, and S's buffer
    # for dS'
    s_q = gl.allocate_shared_memory(dtype, [BT, K], shared)
    s_k = gl.allocate_shared_memory(dtype, [BT, K], shared)
    s_r = gl.allocate_shared_memory(dtype, [BT, V], shared)
    s_do = gl.allocate_shared_memory(dtype, [BT, V], shared)
    s_dy = gl.allocate_shared_memory(dtype, [BT, V], shared)
    s_state = gl.allocate_shared_memory(dtype, [K, V], shared)
    s_e, s_f = square(s_do, V // 64 - 1, V), square(s_dy, V // 64 - 1, V)
    if V == 128:
        s_dq = square(s_do, 0, V)
    else:
        s_dq = gl.allocate_shared_memory(dtype, [BT, BT], shared)
    hopper.async_copy_rows(s_do, do + o_vo, HV * V, rows, 4)
    hopper.async_copy_rows(s_dy, dv + o_vo, HV * V, rows, 4)
    hopper.async_copy_rows(s_r, residual + o_vo, HV * V, rows, 4)
    hopper.async_copy_rows(s_q, q + o_qk, H * K, rows, 4)
    async_copy.commit_group()
    hopper.async_copy_rows(s_state, states + o_s, V, K, 4)
    hopper.async_copy_rows(s_k, k + o_qk, H * K, rows, 4)
    async_copy.commit_group()

    p_gates = gates + (i_hv.to(gl.int64) * tokens + first) * 4
    b_i, last = load_gate(p_gates, rows, row), gl.load(p_gates + (gl.minimum(rows, BT) - 1) * 4)
    r_i, beta_i = load_gate(p_gates + 2, rows, row), load_gate(p_gates + 3, rows, row)
    d_i = nonzero(beta_i * r_i, r_i) * RANGE
    w_j = load_gate(p_gates + 1, rows, col)
    w_j, d_j = w_j * RANGE, nonzero(w_j, load_gate(p_gates + 2, rows, col)) * RANGE
    o_i, o_j = gl.arange(0, BT, row), gl.arange(0, BT, col)

    # E = scale (dO Rᵀ) ⊙ Γ; dQ̂ = scale γ dO Sᵀ + E β K̂ (R: residuals, Γ: decay from token j to i, γ: from the start)
    async_copy.wait_group(1)
    b_e = multiply(s_do, s_r.permute((1, 0)), BT)
    b_q = s_q.load(hopper.row_layout(K, 4)).to(gl.float32)
    rq_i = gl.convert_layout(gl.rsqrt(gl.sum(b_q * b_q, 1) + 1e-6), row)
    b_e = warpgroup_mma_wait(0, deps=[b_e])
    b_e *= hopper.causal_decay(b_i, load_gate(p_gates, rows, col), o_i, o_j) * (scale * rq_i)[:, None]
    b_et, b_e = (b_e * d_j[None, :]).to(dtype), (b_e * w_j[None, :]).to(dtype)
    async_copy.wait_group(0)
    b_dq = multiply(s_do, s_state.permute((1, 0)), K)
    b_dq = warpgroup_mma_wait(0, deps=[b_dq])
    s_e.store(b_et)
    b_dq = scale_rows(b_dq, gl.exp2(b_i) * scale * rq_i * RANGE, K)
    b_dq = accumulate(gl.convert_layout(b_e, left), s_k, b_dq)
    b_dq = warpgroup_mma_wait(0, deps=[b_dq]) * (1 / RANGE)
    dot_i = dot_rows(b_dq, s_q, row, K)
    b_dq = unnormalise(b_dq, s_q, rq_i, dot_i, K)
    store_result(dq + o_dqk, b_dq.to(dtype), s_dq, HV * K, rows, K)

    # F = −(dY Rᵀ) ⊙ Γ without its diagonal (dY = dV); dK̂ = −γ dY Sᵀ + F β K̂ + β X (X: see below; γ, the decays since
    # the chunk's start, and β as diagonal matrices)
    b_f, b_dk = multiply(s_dy, s_r.permute((1, 0)), BT), multiply(s_dy, s_state.permute((1, 0)), K)
    b_f = warpgroup_mma_wait(1, deps=[b_f])
    b_f *= -hopper.causal_decay(b_i, load_gate(p_gates, rows, col), o_i, o_j + 1) * r_i[:, None]
    b_ft, b_f = (b_f * d_j[None, :]).to(dtype), (b_f * w_j[None, :]).to(dtype)
    b_dk = warpgroup_mma_wait(0, deps=[b_dk])
    s_f.store(b_ft)
    hopper.async_copy_rows(s_state, dstates + o_s, V, K, 4)
    async_copy.commit_group()
    b_dk = scale_rows(b_dk, -gl.exp2(b_i) * r_i * RANGE, K)
    fence_async_shared()
    b_dk = accumulate(gl.convert_layout(b_f, left), s_k, b_dk)
    b_dk = warpgroup_mma_wait(0, deps=[b_dk]) * (1 / RANGE)
    dot_k_i = dot_rows(b_dk, s_k, row, K)

    # X = w R dS'ᵀ + Eᵀ Q̂ + Fᵀ K̂ is the gradient of β K̂; w: decay from a token to the chunk's end
    async_copy.wait_group(0)
    b_x = multiply(s_r, s_state.permute((1, 0)), K)
    b_x = scale_rows(warpgroup_mma_wait(0, deps=[b_x]), gl.exp2(last - b_i) * d_i, K)
    out_i = dot_rows(b_x, s_k, row, K) * (r_i / d_i)
    b_x, out_i = apply_write_factor(b_x, out_i, beta_i, writes, dwrites, i_slot.to(gl.int64) * HV + i_hv)
    b_x = accumulate(s_e.permute((1, 0)), s_q, b_x)
    b_x = accumulate(s_f.permute((1, 0)), s_k, b_x)
    b_x = warpgroup_mma_wait(0, deps=[b_x])
    dbeta_i = dot_rows(b_x, s_k, row, K) * (r_i / d_i)
    b_dk += scale_rows(b_x, beta_i * (r_i / d_i), K)
    b_dk = unnormalise(b_dk, s_k, r_i, dot_k_i + beta_i * dbeta_i, K)
    if K == V:
        s_r.store(b_dk.to(dtype))
        hopper.store_rows(dk + o_dqk, s_r, HV * K, rows, 4)
    else:
        store_result(dk + o_dqk, b_dk.to(dtype), s_dq, HV * K, rows, K)

    o_t, p_end = first * HV + i_hv, ends + (i_slot.to(gl.int64) * HV + i_hv) * V
    db_i = dot_i + dot_k_i
    pointers, vectors = GatePointers(g + o_t, dg + o_t, dbeta + o_t, p_end), GateGradients(beta_i, db_i, dbeta_i, out_i)
    store_gate_gradients(pointers, vectors, HV, rows, last, V, row, 4)


class Warps(NamedTuple):
    """A kernel, and its number of warps and registers per thread."""

    kernel: Any
    warps: int
    registers: int


def backward_chunk(
    reverse: Reverse,
    of_states: StateGradients,
    *,
    dq: Tensor,
    dk: Tensor,
    dg: Tensor,
    dbeta: Tensor,
    dwrites: Tensor | None,
    by: Warps | None = None,
) -> None:
    """Write dq and dk of each value head, dg, dβ and the gradient of `writes` into the arguments. Needs `qk_l2norm`."""
    x, terms, saved, do, _, _ = reverse
    B, T, H, K = x.q.shape
    HV, V = x.v.shape[2:]
    # with 168 registers per thread three CTAs fit on an SM; only for K = V = 64 is shared memory enough for three CTAs
    by = by or Warps(backward_chunk_kernel, 4, 168 if K == V == 64 else 255)
    by.kernel[(chunk_slots(B, T, CHUNK, x.cu_seqlens), HV)](
        q=x.q, k=x.k, g=x.g, gates=terms.gates, writes=x.writes, cu_seqlens=x.cu_seqlens, do=do,
        dv=of_states.dv, residual=saved.residual, states=saved.states, dstates=of_states.dstates, ends=of_states.ends,
        dq=dq, dk=dk, dg=dg, dbeta=dbeta, dwrites=dwrites, scale=x.scale, T=T, N=num_sequences(x.q, x.cu_seqlens), H=H,
        group=HV // H, tokens=B * T, K=K, V=V, BT=CHUNK, PACKED=x.cu_seqlens is not None, num_warps=by.warps,
        maxnreg=by.registers,
    )  # fmt: skip
