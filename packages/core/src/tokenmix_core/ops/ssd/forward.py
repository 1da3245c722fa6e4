"""Triton forward kernel: a program scans tokens chunk by chunk, holds BV columns of the state, and writes o."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmix_core.chunking import cdiv, num_sequences
from tokenmix_core.kernels.launch.launcher import cached_launch
from tokenmix_core.kernels.triton.decay import causal_decay_transposed, load_decay
from tokenmix_core.kernels.triton.memory import last_of
from tokenmix_core.kernels.triton.precision import FLOAT32_DOT
from tokenmix_core.kernels.triton.varlen import locate_chunk, locate_slot, sequence_span
from tokenmix_core.ops.slots import Pool, slot_arguments
from tokenmix_core.ops.ssd.tuning import SSDForward
from tokenmix_core.ops.ssd.types import Inputs


@triton.jit
def read_out(b_q, b_k, b_v, b_s, b_b, o_i):
    """Return a chunk's outputs without the factor `scale`, given `b_s`, the state that enters the chunk.

    `b_b` are the log2 decays, cumulated from the chunk's start.
    """
    # computed matrices are right operands of MMAs: left operands would come from registers, which the assemblers of
    # Triton 3.4 to 3.7 compile wrongly for Hopper
    b_p = tl.dot(b_k, tl.trans(b_q), input_precision=FLOAT32_DOT) * causal_decay_transposed(b_b, b_b, o_i, o_i)
    b_ot = tl.dot(tl.trans(b_v), b_p.to(b_v.dtype), input_precision=FLOAT32_DOT)
    return tl.dot(b_q, b_s.to(b_q.dtype), input_precision=FLOAT32_DOT) * tl.exp2(b_b)[:, None] + tl.trans(b_ot)


@cached_launch
@triton.jit(do_not_specialize=["T", "N", "G", "HV", "segment"])
def ssd_forward_kernel(
    q, k, v, g, dt, D, o, initial_state, final_state, cu_seqlens, slots, fresh,
    stride_q, stride_k, stride_v, stride_state, scale, T, N, G, HV, segment,
    K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr,
    SEGMENTED: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Scan a sequence or (SEGMENTED) segment, BV columns of a head's state per program.

    The strides of q, k and v lead from token to token, `stride_state` from slot to slot.

    With `slots`, final states are stored in slots of the pool `final_state`, also by the last segments of sequences;
    initial states of whole sequences are in the same slots.
    """
    i_p = tl.program_id(0)
    i_v = i_p % (V // BV)
    i_h = i_p // (V // BV) % HV
    i_s = i_p // (V // BV) // HV
    if SEGMENTED:
        i_n, bos, length, first = locate_chunk(i_s, T, segment, N, cu_seqlens, PACKED)
        if slots is not None:
            ends = (first + segment >= length) & (first < length)
        length = tl.minimum(length, first + segment)
    else:
        i_n = i_s
        bos, length = sequence_span(i_n, T, cu_seqlens, PACKED)
        first = 0
        if slots is not None:
            ends = True
    i_g = i_h // (HV // G)
    bos += first
    q += i_g * K
    k += i_g * K
    v += i_h * V + i_v * BV
    o += i_h * V + i_v * BV
    g += i_h
    if dt is not None:
        dt += i_h
    if D is not None:
        b_skip = tl.load(D + i_h).to(tl.float32)

    o_i = tl.arange(0, BT)
    o_k = tl.arange(0, K)
    o_v = tl.arange(0, BV)
    o_state = (i_s.to(tl.int64) * HV + i_h) * K * V + i_v * BV + o_k[:, None] * V + o_v[None, :]
    b_s = tl.zeros([K, BV], tl.float32)
    if slots is not None:
        slot, held = locate_slot(i_n, slots, fresh)
        o_final = slot * stride_state + i_h * (K * V) + i_v * BV + o_k[:, None] * V + o_v[None, :]
    if slots is not None and not SEGMENTED:
        b_s += tl.load(initial_state + o_final, mask=o_k[:, None] < tl.where(held, K, 0), other=0.0)
    elif initial_state is not None:
        b_s += tl.load(initial_state + o_state)
    for i_t in range(tl.cdiv(length - first, BT)):
        o_t = bos + i_t * BT
        m_t = i_t * BT + o_i < length - first
        b_g = load_decay(g + o_t * HV + o_i * HV, m_t)
        b_b = tl.cumsum(b_g, 0)
        b_total = last_of(b_b, length - first - i_t * BT, BT)
        p_q = q + o_t * stride_q + o_i[:, None] * stride_q + o_k[None, :]
        p_k = k + o_t * stride_k + o_i[:, None] * stride_k + o_k[None, :]
        p_v = v + o_t * stride_v + o_i[:, None] * stride_v + o_v[None, :]
        b_k = tl.load(p_k, mask=m_t[:, None], other=0.0)
        b_v = tl.load(p_v, mask=m_t[:, None], other=0.0)
        b_q = tl.load(p_q, mask=m_t[:, None], other=0.0)
        b_x = b_v
        if dt is not None:
            b_dt = tl.load(dt + o_t * HV + o_i * HV, mask=m_t, other=0.0).to(tl.float32)
            b_x = (b_v * b_dt[:, None]).to(b_v.dtype)
        b_o = read_out(b_q, b_k, b_x, b_s, b_b, o_i) * scale
        if D is not None:
            b_o += b_v.to(tl.float32) * b_skip
        p_o = o + o_t * HV * V + o_i[:, None] * (HV * V) + o_v[None, :]
        tl.store(p_o, b_o.to(o.dtype.element_ty), mask=m_t[:, None])

        # the weights of v are computed from v itself, so that the state's operand is rounded once
        b_weight = tl.exp2(b_total - b_b)
        if dt is not None:
            b_weight *= b_dt
        b_w = (b_v * b_weight[:, None]).to(b_v.dtype)
        b_s = tl.dot(tl.trans(b_k), b_w, b_s * tl.exp2(b_total), input_precision=FLOAT32_DOT)
    if slots is not None:
        tl.store(final_state + o_final, b_s, mask=o_k[:, None] < tl.where(ends & (slot >= 0), K, 0))
    elif not SEGMENTED:
        tl.store(final_state + o_state, b_s)


def ssd_forward(
    x: Inputs, *, entering: Tensor | None, segment: int, config: SSDForward, pool: Pool | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return outputs and final states; if sequences are split into segments, None instead of the final states.

    With `pool`, final states overwrite its slots, and are not returned; whole sequences start from the slots.

    If `segment` is positive, a program scans `segment` tokens, and `entering [slots, HV, K, V]` are the states that
    enter segments, one entry each. If it is 0, a program scans a sequence, and `entering [N, HV, K, V]` are initial
    states or None.
    """
    _, T, G, K = x.q.shape
    HV, V = x.v.shape[2:]
    N = num_sequences(x.q, x.cu_seqlens)
    o = torch.empty_like(x.v, memory_format=torch.contiguous_format)
    final_state = None if pool is None else pool.state
    if pool is not None:
        entering = entering if segment else pool.state
    elif not segment:
        final_state = torch.empty(N, HV, K, V, dtype=torch.float32, device=x.v.device)
    spans = N if entering is None or not segment else len(entering)
    if config.hopper:
        from tokenmix_core.ops.ssd.hopper.forward import hopper_forward

        if not segment and config.lookback and pool is None:
            segment, spans = config.lookback, N * cdiv(T, config.lookback)
        hopper_forward(
            x, entering=entering, o=o, final_state=final_state, segment=segment, spans=spans, columns=config.hopper,
            pool=pool,
        )  # fmt: skip
        return o, None if pool is not None else final_state
    ssd_forward_kernel[(spans * HV * cdiv(V, config.BV),)](
        q=x.q, k=x.k, v=x.v, g=x.g, dt=x.dt, D=x.D, o=o, initial_state=entering, final_state=final_state,
        **slot_arguments(pool), cu_seqlens=x.cu_seqlens, stride_q=x.q.stride(1), stride_k=x.k.stride(1),
        stride_v=x.v.stride(1), scale=x.scale, T=T, N=N, G=G, HV=HV, segment=segment, K=K, V=V, BT=config.BT,
        BV=config.BV, SEGMENTED=segment > 0, PACKED=x.cu_seqlens is not None, num_warps=config.num_warps,
        num_stages=config.num_stages,
    )  # fmt: skip
    return o, None if pool is not None else final_state
