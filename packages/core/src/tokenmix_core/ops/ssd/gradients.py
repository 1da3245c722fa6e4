"""Compute all gradients of a chunk (Triton), given the state before it and the gradient of the state after it."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmix_core.chunking import chunk_slots, num_sequences
from tokenmix_core.kernels.launch.launcher import cached_launch
from tokenmix_core.kernels.triton.decay import causal_decay, causal_decay_transposed, load_decay
from tokenmix_core.kernels.triton.memory import last_of
from tokenmix_core.kernels.triton.precision import FLOAT32_DOT
from tokenmix_core.kernels.triton.varlen import locate_chunk
from tokenmix_core.ops.ssd.tuning import SSDGradients
from tokenmix_core.ops.ssd.types import Gradients, Inputs


@triton.jit
def decay_gradient(b_m, b_query, b_key, b_state, BT: tl.constexpr):
    """Return dg_t = Σ_{i ≥ t > j} M_ij + Σ_{i ≥ t} query_i + Σ_{j < t} key_j + state, as README.md derives it.

    M (`b_m`) are the terms between two tokens of the chunk, `b_query` those from the state before the chunk to token i,
    `b_key` those from token j to the state after the chunk, and `b_state` the term from state to state.
    """
    o_i = tl.arange(0, BT)
    b_m = tl.where(o_i[:, None] > o_i[None, :], b_m, 0.0)
    b_suffix = tl.cumsum(tl.sum(b_m, 1) - tl.sum(b_m, 0) + b_query, 0, reverse=True)
    # a masked sum, not a cumulative sum minus the token's own term, which would have rounding errors where the exact
    # result is 0
    b_prefix = tl.sum(tl.where(o_i[None, :] < o_i[:, None], b_key[None, :], 0.0), 1)
    return b_suffix + b_prefix + b_state


@cached_launch(loop_tiles=("BV",))
@triton.jit(do_not_specialize=["T", "N", "G", "HV"])
def ssd_gradients_kernel(
    q, k, v, do, g, states, dstates, dq, dk, dv, dg, cu_seqlens,
    stride_q, stride_k, stride_v, stride_do, scale, T, N, G, HV,
    K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Compute all gradients of a chunk and value head; dq and dk are those of this value head only.

    Gradients are computed transposed, so that computed matrices are right operands of MMAs.
    """
    i_c = tl.program_id(0) // HV
    i_h = tl.program_id(0) % HV
    _, bos, length, first = locate_chunk(i_c, T, BT, N, cu_seqlens, PACKED)
    if first >= length:
        return
    bos += first
    i_g = i_h // (HV // G)
    o_i = tl.arange(0, BT)
    o_k = tl.arange(0, K)
    m_t = o_i < length - first
    b_q = tl.load(q + bos * stride_q + i_g * K + o_i[:, None] * stride_q + o_k[None, :], mask=m_t[:, None], other=0.0)
    b_k = tl.load(k + bos * stride_k + i_g * K + o_i[:, None] * stride_k + o_k[None, :], mask=m_t[:, None], other=0.0)

    o_v = tl.arange(0, BV)
    b_g = load_decay(g + bos * HV + i_h + o_i * HV, m_t)
    b_b = tl.cumsum(b_g, 0)
    b_total = last_of(b_b, tl.sum(m_t.to(tl.int32), 0), BT)
    b_to_end = tl.exp2(b_total - b_b)
    p_v = v + bos * stride_v + i_h * V + o_i[:, None] * stride_v + o_v[None, :]
    p_do = do + bos * stride_do + i_h * V + o_i[:, None] * stride_do + o_v[None, :]
    b_dp = tl.zeros([BT, BT], tl.float32)
    b_dpt = tl.zeros([BT, BT], tl.float32)
    b_v = tl.load(p_v, mask=m_t[:, None], other=0.0)
    b_do = tl.load(p_do, mask=m_t[:, None], other=0.0)
    # do not unroll this loop: in float32, unrolled code spills five times as many registers and compiles in 90 s
    for i_v in range(V // BV):
        if BV < V:
            b_v = tl.load(p_v + i_v * BV, mask=m_t[:, None], other=0.0)
            b_do = tl.load(p_do + i_v * BV, mask=m_t[:, None], other=0.0)
        b_dp = tl.dot(b_do, tl.trans(b_v), b_dp, input_precision=FLOAT32_DOT)
        b_dpt = tl.dot(b_v, tl.trans(b_do), b_dpt, input_precision=FLOAT32_DOT)
    b_qk = tl.dot(b_q, tl.trans(b_k), input_precision=FLOAT32_DOT) * scale
    b_gamma = causal_decay(b_b, b_b, o_i, o_i)
    b_dp *= b_gamma
    b_m = b_qk * b_dp
    b_p = (b_qk * b_gamma).to(b_q.dtype)
    b_dp = (b_dp * scale).to(b_q.dtype)
    b_dpt = (b_dpt * causal_decay_transposed(b_b, b_b, o_i, o_i) * scale).to(b_q.dtype)

    o_state = (i_c.to(tl.int64) * HV + i_h) * K * V + o_k[:, None] * V + o_v[None, :]
    p_dv = dv + (bos * HV + i_h) * V + o_i[None, :] * (HV * V) + o_v[:, None]
    b_dq = tl.zeros([K, BT], tl.float32)
    b_dk = tl.zeros([K, BT], tl.float32)
    b_sd = 0.0
    for i_v in range(V // BV):
        if BV < V:
            b_v = tl.load(p_v + i_v * BV, mask=m_t[:, None], other=0.0)
            b_do = tl.load(p_do + i_v * BV, mask=m_t[:, None], other=0.0)
        b_s = tl.load(states + o_state + i_v * BV)
        b_d = tl.load(dstates + o_state + i_v * BV)
        b_sd += tl.sum(b_s.to(tl.float32) * b_d.to(tl.float32))
        b_dv = tl.dot(tl.trans(b_d), tl.trans(b_k), input_precision=FLOAT32_DOT) * b_to_end[None, :]
        b_dv = tl.dot(tl.trans(b_do), b_p, b_dv, input_precision=FLOAT32_DOT)
        tl.store(p_dv + i_v * BV, b_dv.to(dv.dtype.element_ty), mask=m_t[None, :])
        b_dq = tl.dot(b_s, tl.trans(b_do), b_dq, input_precision=FLOAT32_DOT)
        b_dk = tl.dot(b_d, tl.trans(b_v), b_dk, input_precision=FLOAT32_DOT)
    b_dq *= (tl.exp2(b_b) * scale)[None, :]
    b_query = tl.sum(b_dq * tl.trans(b_q).to(tl.float32), 0)
    b_dq = tl.dot(tl.trans(b_k), b_dpt, b_dq, input_precision=FLOAT32_DOT)
    b_dk *= b_to_end[None, :]
    b_key = tl.sum(b_dk * tl.trans(b_k).to(tl.float32), 0)
    b_dk = tl.dot(tl.trans(b_q), b_dp, b_dk, input_precision=FLOAT32_DOT)
    b_dg = decay_gradient(b_m, b_query, b_key, b_sd * tl.exp2(b_total), BT)
    tl.store(dg + bos * HV + i_h + o_i * HV, b_dg, mask=m_t)
    o_dqk = (bos * HV + i_h) * K + o_i[None, :] * (HV * K) + o_k[:, None]
    tl.store(dq + o_dqk, b_dq.to(dq.dtype.element_ty), mask=m_t[None, :])
    tl.store(dk + o_dqk, b_dk.to(dk.dtype.element_ty), mask=m_t[None, :])


def ssd_gradients(x: Inputs, *, do: Tensor, states: Tensor, dstates: Tensor, config: SSDGradients) -> Gradients:
    """Return all gradients but the initial state's, given states before chunks and gradients `dstates` of states after.

    Only Gluon kernels accept Δ and D; if the portable kernel runs, x has neither.
    """
    if config.hopper is not None:
        from tokenmix_core.ops.ssd.hopper.gradients import hopper_gradients

        return _like_inputs(x, hopper_gradients(x, do=do, states=states, dstates=dstates, config=config.hopper))
    B, T, G, K = x.q.shape
    HV, V = x.v.shape[2:]
    dq, dk = (torch.empty((B, T, HV, K), dtype=x.q.dtype, device=x.q.device) for _ in range(2))
    dv = torch.empty_like(x.v, memory_format=torch.contiguous_format)
    dg = torch.empty(x.g.shape, dtype=torch.float32, device=x.g.device)
    ssd_gradients_kernel[(chunk_slots(B, T, config.BT, x.cu_seqlens) * HV,)](
        q=x.q, k=x.k, v=x.v, do=do, g=x.g, states=states, dstates=dstates, dq=dq, dk=dk, dv=dv, dg=dg,
        cu_seqlens=x.cu_seqlens, stride_q=x.q.stride(1), stride_k=x.k.stride(1), stride_v=x.v.stride(1),
        stride_do=do.stride(1), scale=x.scale, T=T, N=num_sequences(x.q, x.cu_seqlens), G=G, HV=HV, K=K, V=V,
        BT=config.BT, BV=config.BV, PACKED=x.cu_seqlens is not None, num_warps=config.num_warps,
        num_stages=config.num_stages,
    )  # fmt: skip
    return _like_inputs(x, Gradients(q=dq, k=dk, v=dv, g=dg))


def backward_scan(x: Inputs, *, do: Tensor, states: Tensor, dleaving: Tensor | None, segment: int) -> Gradients:
    """Return all gradients, from the reverse scan on Hopper, which keeps the gradient of the state in registers."""
    from tokenmix_core.ops.ssd.hopper.backward_scan import hopper_backward_scan

    return _like_inputs(x, hopper_backward_scan(x, do=do, states=states, dleaving=dleaving, segment=segment))


def _like_inputs(x: Inputs, grads: Gradients) -> Gradients:
    """Cast dg, dΔ and dD to the inputs' dtypes; sum dq and dk over the heads of a group in a fixed order."""
    dq, dk = (t if t.shape[2] == x.q.shape[2] else t.unflatten(2, (x.q.shape[2], -1)).sum(3) for t in grads[:2])
    pairs = (grads.g, x.g), (grads.dt, x.dt), (grads.D, x.D)
    dg, dt, D = (t if t is None or y is None else t.to(y.dtype) for t, y in pairs)
    return grads._replace(q=dq, k=dk, g=dg, dt=dt, D=D)
