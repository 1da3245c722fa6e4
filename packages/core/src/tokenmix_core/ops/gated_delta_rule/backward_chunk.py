"""Compute the gradients of q, k, g and β, in parallel over chunks (Triton); README.md defines the letters."""

import torch
import triton
import triton.language as tl

from tokenmix_core.chunking import chunk_slots, num_sequences
from tokenmix_core.kernels.launch.launcher import cached_launch
from tokenmix_core.kernels.triton.decay import LOG2_E, LOWEST, causal_decay, causal_decay_transposed
from tokenmix_core.kernels.triton.memory import (
    column,
    diagonal_inverse_norm,
    last_of,
    load_rows,
    load_vector,
    store_rows,
    store_vector,
)
from tokenmix_core.kernels.triton.varlen import first_chunk, locate_chunk
from tokenmix_core.ops.gated_delta_rule import tuning
from tokenmix_core.ops.gated_delta_rule.constants import CHUNK, SIZES, dot_precision
from tokenmix_core.ops.gated_delta_rule.plan import Form
from tokenmix_core.ops.gated_delta_rule.types import Gradients, Reverse, StateGradients


@triton.jit
def unnormalise(b_dx, b_x, r_x, b_dot):
    """Return r (dx̂ − x̂ (x̂ · dx̂)), the gradient of x from the gradient dx̂ of x̂ = r x, where r = (Σ x² + ε)^−½."""
    return (b_dx.to(tl.float32) - b_x.to(tl.float32) * (r_x * b_dot)[:, None]) * r_x[:, None]


@cached_launch(loop_tiles=("BV", "BK"))
@triton.jit(do_not_specialize=SIZES)
def backward_chunk_kernel(
    q, k, g, gates, writes, cu_seqlens, do, dv, residual, states, dstates, ends, bare_ends, dq, dk, dg, dbeta, dwrites,
    scale, T, N, H, group, tokens,
    K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, PARTS: tl.constexpr,
    WRITES: tl.constexpr, L2NORM: tl.constexpr, PACKED: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Compute dQ, dK, dg and dβ of one chunk and value head; with WRITES = 1 also the gradient of its write factor.

    If WRITES > 1, WRITES consecutive chunks share a write factor. `dstates` then already include the factor, and
    `bare_ends` is the gradient of each chunk's log-decay through the state without the writes of these chunks.

    A matrix and its transpose are computed by separate MMAs: a transposed accumulator would pass through shared memory
    to become an operand, and some versions of Triton compile that wrongly for Hopper.
    """
    i_slot, i_hv = tl.program_id(0), tl.program_id(1)
    i_n, bos, length, start = locate_chunk(i_slot, T, BT, N, cu_seqlens, PACKED)
    if start >= length:
        return
    first, rows = bos + start, length - start
    HV = H * group
    if WRITES:
        i_w = (first_chunk(i_n, bos, T, BT * WRITES, PACKED) + start // (BT * WRITES)).to(tl.int64) * HV + i_hv
    o_t, o_k, o_v = tl.arange(0, BT), tl.arange(0, BK), tl.arange(0, BV)
    p_q, p_k = q + (first * H + i_hv // group) * K, k + (first * H + i_hv // group) * K
    p_dq, p_dk = dq + (first * HV + i_hv) * K, dk + (first * HV + i_hv) * K
    o_vo = (first * HV + i_hv) * V
    p_tile = (i_slot.to(tl.int64) * HV + i_hv) * K * V + o_k[:, None] * V + o_v[None, :]

    b_gates = load_rows(gates + (i_hv.to(tl.int64) * tokens + first) * 4, 4, rows, BT, 4)
    b_b, b_w, r_k, b_beta = column(b_gates, 0), column(b_gates, 1), column(b_gates, 2), column(b_gates, 3)
    b_last = last_of(b_b, rows, BT)
    b_b = tl.where(o_t < rows, b_b, b_last)

    # E = scale (dO Rᵀ) ⊙ Γ, F = −(dY Rᵀ) ⊙ Γ without its diagonal, and their transposes; R: residuals, Γ: decay from
    # token j to i ≥ j
    b_e, b_et = tl.zeros([BT, BT], tl.float32), tl.zeros([BT, BT], tl.float32)
    b_f, b_ft = tl.zeros([BT, BT], tl.float32), tl.zeros([BT, BT], tl.float32)
    for i_v in range(V // BV):
        b_r = load_rows(residual + o_vo + i_v * BV, HV * V, rows, BT, BV)
        b_dy = load_rows(dv + o_vo + i_v * BV, HV * V, rows, BT, BV)
        b_f = tl.dot(b_dy, tl.trans(b_r), b_f, input_precision=DOT)
        b_ft = tl.dot(b_r, tl.trans(b_dy), b_ft, input_precision=DOT)
        if do is not None:
            b_do = load_rows(do + o_vo + i_v * BV, HV * V, rows, BT, BV)
            b_e = tl.dot(b_do, tl.trans(b_r), b_e, input_precision=DOT)
            b_et = tl.dot(b_r, tl.trans(b_do), b_et, input_precision=DOT)
    b_qk, b_kk, b_qq = tl.zeros([BT, BT], tl.float32), tl.zeros([BT, BT], tl.float32), tl.zeros([BT, BT], tl.float32)
    for i_k in range(K // BK):
        b_q, b_k = load_rows(p_q + i_k * BK, H * K, rows, BT, BK), load_rows(p_k + i_k * BK, H * K, rows, BT, BK)
        b_kk = tl.dot(b_k, tl.trans(b_k), b_kk, input_precision=DOT)
        b_qk = tl.dot(b_q, tl.trans(b_k), b_qk, input_precision=DOT)
        if L2NORM:
            b_qq = tl.dot(b_q, tl.trans(b_q), b_qq, input_precision=DOT)
    r_q = tl.zeros([BT], tl.float32) + 1.0
    if L2NORM:
        r_q = diagonal_inverse_norm(b_qq, BT)

    # b_ew, b_et, b_fw: E and F with all factors, as 16-bit operands: dQ̂ takes b_ew K, dK̂ takes b_et Q + b_fw K. Then,
    # in float32: terms of dβ, and of x̂ · dx̂ for x = q and k, which `unnormalise` needs
    b_decay = causal_decay(b_b, b_b, o_t, o_t)
    b_e *= b_decay * scale
    b_f *= tl.where(o_t[:, None] > o_t[None, :], -b_decay, 0.0)
    b_decay = causal_decay_transposed(b_b, b_b, o_t, o_t)
    b_et *= b_decay * b_beta[:, None] * (r_q * scale)[None, :]
    b_ft *= tl.where(o_t[:, None] < o_t[None, :], -b_decay, 0.0) * b_beta[:, None] * r_k[None, :]
    b_fw = (b_f * b_w[None, :] + b_ft).to(k.dtype.element_ty)
    b_ew, b_et = (b_e * b_w[None, :]).to(k.dtype.element_ty), b_et.to(k.dtype.element_ty)
    b_e *= b_qk * r_q[:, None] * r_k[None, :]
    b_f *= b_kk * r_k[:, None] * r_k[None, :]
    b_dbeta = tl.sum(b_e + b_f, 0)
    b_dot_q, b_dot_k = tl.sum(b_e * b_beta[None, :], 1), tl.sum(b_f * b_beta[None, :], 1)

    # dQ̂ = scale γ dO Sᵀ + E β K̂; dK̂ = −γ dY Sᵀ + (F β + β Fᵀ) K̂ + β Eᵀ Q̂ + β w R dS'ᵀ, with γ, β and w as diagonal
    # matrices: γ = 2^b, the decay since the chunk's start, and w = 2^(b_last − b), the decay to its end
    b_out = tl.zeros([BT], tl.float32)
    share = 1.0
    if WRITES == 1:
        share = tl.load(writes + i_w).to(tl.float32)
    for i_k in range(K // BK):
        b_q, b_k = load_rows(p_q + i_k * BK, H * K, rows, BT, BK), load_rows(p_k + i_k * BK, H * K, rows, BT, BK)
        b_dq, b_dk = tl.zeros([BT, BK], tl.float32), tl.zeros([BT, BK], tl.float32)
        b_dw = tl.zeros([BT, BK], tl.float32)
        for i_v in range(V // BV):
            b_s, b_ds = tl.load(states + p_tile + i_v * BV), tl.load(dstates + p_tile + i_v * BV)
            if do is not None:
                b_do = load_rows(do + o_vo + i_v * BV, HV * V, rows, BT, BV)
                b_dq = tl.dot(b_do, tl.trans(b_s), b_dq, input_precision=DOT)
            b_dy = load_rows(dv + o_vo + i_v * BV, HV * V, rows, BT, BV)
            b_dk = tl.dot(b_dy, tl.trans(b_s), b_dk, input_precision=DOT)
            b_r = load_rows(residual + o_vo + i_v * BV, HV * V, rows, BT, BV)
            b_dw = tl.dot(b_r, tl.trans(b_ds), b_dw, input_precision=DOT)
        b_dw *= tl.exp2(b_last - b_b)[:, None]
        b_out += tl.sum(b_dw * b_k.to(tl.float32), 1) * r_k
        if WRITES == 1:
            b_dw *= share
        b_dk *= -tl.exp2(b_b)[:, None]
        b_dot_k += tl.sum(b_dk * b_k.to(tl.float32), 1) * r_k
        b_dk = tl.dot(b_fw, b_k, b_dk + b_dw * b_beta[:, None], input_precision=DOT)
        if do is not None:
            b_dk = tl.dot(b_et, b_q, b_dk, input_precision=DOT)
            b_dq *= (tl.exp2(b_b) * scale)[:, None]
            b_dot_q += tl.sum(b_dq * b_q.to(tl.float32), 1) * r_q
            b_dq = tl.dot(b_ew, b_k, b_dq, input_precision=DOT)
        if L2NORM and K == BK:
            b_dq = unnormalise(b_dq, b_q, r_q, b_dot_q)
            b_dk = unnormalise(b_dk, b_k, r_k, b_dot_k + b_beta * (b_dbeta + b_out * share))
        store_rows(p_dq + i_k * BK, b_dq, HV * K, rows, BT, BK)
        store_rows(p_dk + i_k * BK, b_dk, HV * K, rows, BT, BK)
        p_tile += BK * V
    if WRITES == 1:
        tl.store(dwrites + i_w, tl.sum(b_out * b_beta, 0))
        b_out *= share
    b_dbeta += b_out
    if L2NORM and K > BK:
        # x̂ · dx̂ is a sum over all columns of dQ or dK, so it is complete only after the loop over columns
        tl.debug_barrier()
        for i_k in range(K // BK):
            b_q, b_k = load_rows(p_q + i_k * BK, H * K, rows, BT, BK), load_rows(p_k + i_k * BK, H * K, rows, BT, BK)
            b_dq = load_rows(p_dq + i_k * BK, HV * K, rows, BT, BK)
            b_dk = load_rows(p_dk + i_k * BK, HV * K, rows, BT, BK)
            b_dq = unnormalise(b_dq, b_q, r_q, b_dot_q)
            b_dk = unnormalise(b_dk, b_k, r_k, b_dot_k + b_beta * b_dbeta)
            store_rows(p_dq + i_k * BK, b_dq, HV * K, rows, BT, BK)
            store_rows(p_dk + i_k * BK, b_dk, HV * K, rows, BT, BK)
    store_vector(dbeta + first * HV + i_hv, b_dbeta, HV, rows, BT)

    # dg of a token is the sum of db, the gradient of the cumulative decay b, over the tokens from this one to the
    # chunk's end, plus the gradient of b_last as the decay of the state and of the writes; dg is zero where g was
    # clamped
    b_db = tl.where(o_t < rows, b_dot_q + b_dot_k - b_beta * b_dbeta, 0.0)
    b_end = tl.load(ends + (i_slot.to(tl.int64) * HV + i_hv) * PARTS + tl.arange(0, PARTS))
    b_dg = tl.cumsum(b_db, 0, reverse=True) + tl.sum(b_end, 0) * tl.exp2(b_last) + tl.sum(b_out * b_beta, 0)
    if WRITES > 1:
        b_dg += tl.sum(tl.load(bare_ends + i_w * PARTS + tl.arange(0, PARTS)), 0)
    b_g = load_vector(g + first * HV + i_hv, HV, rows, BT)
    store_vector(dg + first * HV + i_hv, tl.where(b_g * LOG2_E < LOWEST, 0.0, b_dg), HV, rows, BT)


def backward_chunk(reverse: Reverse, of_states: StateGradients, may_overwrite: bool, form: Form) -> Gradients:
    """Return all gradients in the dtypes of their inputs, but float32 for `writes`; dq and dk for each value head.

    If `may_overwrite`, dK may be written over the saved residuals R.
    """
    x, terms, saved, do, _, _ = reverse
    B, T, H, K = x.q.shape
    HV, V = x.v.shape[2:]
    # zeros, because in a packed batch some entries belong to no chunk and no kernel writes them
    dwrites = None if x.writes is None else torch.zeros_like(x.writes)
    dq, dg, dbeta = x.q.new_empty(B, T, HV, K), torch.empty_like(x.g), torch.empty_like(x.beta)
    # let dK take the memory of R, for a lower peak: a Gluon program reads its rows of R before it writes these rows of
    # dK
    dk = saved.residual if form == "gluon" and may_overwrite and K == V else x.k.new_empty(B, T, HV, K)
    if form == "gluon":
        from tokenmix_core.ops.gated_delta_rule.hopper import backward_chunk as on_hopper

        on_hopper.backward_chunk(reverse, of_states, dq=dq, dk=dk, dg=dg, dbeta=dbeta, dwrites=dwrites)
    elif form == "gluon tiled":
        from tokenmix_core.ops.gated_delta_rule.hopper import backward_chunk_tiled as by_tiles

        by_tiles.backward_chunk_tiled(reverse, of_states, dq=dq, dk=dk, dg=dg, dbeta=dbeta, dwrites=dwrites)
    else:
        launch = tuning.scan_tile("backward_chunk", K, V, x.q.element_size(), B * HV)
        bare_ends = None if of_states.of_writes is None else of_states.of_writes.decay
        backward_chunk_kernel[(chunk_slots(B, T, CHUNK, x.cu_seqlens), HV)](
            q=x.q, k=x.k, g=x.g, gates=terms.gates, writes=x.writes, cu_seqlens=x.cu_seqlens, do=do, dv=of_states.dv,
            residual=saved.residual, states=saved.states, dstates=of_states.dstates, ends=of_states.ends,
            bare_ends=bare_ends, dq=dq, dk=dk, dg=dg, dbeta=dbeta, dwrites=dwrites, scale=x.scale, T=T,
            N=num_sequences(x.q, x.cu_seqlens), H=H, group=HV // H, tokens=B * T, K=K, V=V, BT=CHUNK,
            BK=min(K, launch.BK), BV=launch.BV, PARTS=of_states.ends.shape[-1], WRITES=x.chunks_per_write,
            L2NORM=x.qk_l2norm, PACKED=x.cu_seqlens is not None, DOT=dot_precision(x.q), num_warps=launch.num_warps,
            num_stages=launch.num_stages,
        )  # fmt: skip
    if of_states.of_writes is not None:
        dwrites = of_states.of_writes.factor.sum(-1)
    return Gradients(
        q=dq, k=dk, v=of_states.dv, g=dg, beta=dbeta, initial_state=of_states.dinitial_state, writes=dwrites
    )
