"""The gated delta rule token by token, with the state in registers: for decoding and short inputs."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmix_core.chunking import num_sequences
from tokenmix_core.kernels.launch.launcher import cached_launch
from tokenmix_core.kernels.pdl import gdc_launch_and_wait
from tokenmix_core.kernels.triton.varlen import first_chunk, sequence_span
from tokenmix_core.ops.decode_tiles import StateStep
from tokenmix_core.ops.gated_delta_rule import tuning
from tokenmix_core.ops.gated_delta_rule.constants import SIZES
from tokenmix_core.ops.gated_delta_rule.types import Inputs
from tokenmix_core.ops.slots import slot_stride


@triton.jit
def scan_token(b_s, p_q, p_k, p_v, p_g, p_beta, p_o, scale, L2NORM: tl.constexpr):
    """Store a token's output and return the state after it; with L2NORM, sums over K are scaled instead of q and k."""
    b_q, b_k, b_v = tl.load(p_q).to(tl.float32), tl.load(p_k).to(tl.float32), tl.load(p_v).to(tl.float32)
    decay, beta_t = tl.exp(tl.load(p_g).to(tl.float32)), tl.load(p_beta).to(tl.float32)
    r_q, r_k = scale, 1.0
    if L2NORM:
        r_q = scale * tl.rsqrt(tl.sum(b_q * b_q, 0) + 1e-6)
        r_k = tl.rsqrt(tl.sum(b_k * b_k, 0) + 1e-6)
    # compute Sᵀ k and Sᵀ q of the old state S together; the update k uᵀ (u: `b_u`) then adds (k · q) u to the output
    b_sk, b_sq = tl.sum(b_s * b_k[:, None], 0), tl.sum(b_s * b_q[:, None], 0)
    b_u = (b_v - decay * r_k * b_sk) * (beta_t * r_k)
    b_o = r_q * (decay * b_sq + tl.sum(b_k * b_q, 0) * b_u)
    tl.store(p_o, b_o.to(p_o.dtype.element_ty))
    return b_s * decay + b_k[:, None] * b_u[None, :]


@cached_launch
@triton.jit(do_not_specialize=SIZES)
def recurrent_kernel(
    q, k, v, g, beta, writes, cu_seqlens, slots, o, state_in, state_out, stride_state, scale, T, H, group,
    K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, WRITES: tl.constexpr, L2NORM: tl.constexpr,
    PACKED: tl.constexpr, STEP: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """Scan one sequence, value head and tile of V in a program; `state_out` may be the same tensor as `state_in`.

    STEP: each sequence has one token, and the kernel has no loop, which would cost registers; it may have `slots`.
    WRITES tokens share a factor in `writes`.
    """
    gdc_launch_and_wait(PDL)
    i_v, i_nh = tl.program_id(0) % (V // BV), tl.program_id(0) // (V // BV)
    HV = H * group
    i_n, i_hv = i_nh // HV, i_nh % HV
    bos, length = sequence_span(i_n, T, cu_seqlens, PACKED)
    o_k, o_v = tl.arange(0, K), i_v * BV + tl.arange(0, BV)
    p_state = i_nh.to(tl.int64) * K * V
    if slots is not None:
        i_slot = tl.load(slots + i_n).to(tl.int64)
        if i_slot < 0:
            tl.store(o + (bos * HV + i_hv) * V + o_v, tl.zeros([BV], o.dtype.element_ty))
            return
        p_state = i_slot * stride_state + i_hv * (K * V)
    p_state = p_state + o_k[:, None] * V + o_v[None, :]
    if state_in is not None:
        b_s = tl.load(state_in + p_state).to(tl.float32)
    else:
        b_s = tl.zeros([K, BV], tl.float32)

    o_g = bos * HV + i_hv
    p_q, p_k = q + (bos * H + i_hv // group) * K + o_k, k + (bos * H + i_hv // group) * K + o_k
    p_v, p_o, p_g, p_beta = v + o_g * V + o_v, o + o_g * V + o_v, g + o_g, beta + o_g
    if STEP:
        b_s = scan_token(b_s, p_q, p_k, p_v, p_g, p_beta, p_o, scale, L2NORM)
    else:
        if WRITES:
            p_w = writes + first_chunk(i_n, bos, T, WRITES, PACKED).to(tl.int64) * HV + i_hv
            b_bare = b_s
        for t in range(length):
            b_s = scan_token(b_s, p_q, p_k, p_v, p_g, p_beta, p_o, scale, L2NORM)
            if WRITES:
                b_bare *= tl.exp(tl.load(p_g).to(tl.float32))
                if ((t + 1) % WRITES == 0) | (t + 1 == length):
                    share = tl.load(p_w).to(tl.float32)
                    p_w += HV
                    b_s = b_bare + share * (b_s - b_bare)
                    b_bare = b_s
            p_q += H * K
            p_k += H * K
            p_v += HV * V
            p_o += HV * V
            p_g += HV
            p_beta += HV
    tl.store(state_out + p_state, b_s)


def recurrent_forward(
    x: Inputs, tile: StateStep | None = None, state_out: Tensor | None = None, slots: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return outputs and final states; write the final states to `state_out` (may be the initial state) if given.

    With `tile` a Gluon kernel computes a single token and overwrites its state, `state_out`. With `slots`, for single
    tokens, the states of the sequences are these slots of `state_out`.
    """
    _, T, H, K = x.q.shape
    HV, V = x.v.shape[2:]
    N = num_sequences(x.q, x.cu_seqlens)
    q, k, v, g, beta = (t.contiguous() for t in x[:5])
    o, state_in = torch.empty_like(v), x.initial_state
    if state_out is None:
        state_out = q.new_empty(N, HV, K, V, dtype=torch.float32)
        state_in = None if state_in is None else state_in.contiguous()
    slots, stride_state = None if slots is None else slots.contiguous(), slot_stride(slots, state_out)
    arguments = dict(
        q=q, k=k, v=v, g=g, beta=beta, o=o, slots=slots, stride_state=stride_state, scale=x.scale, H=H, group=HV // H,
        K=K, V=V,
    )  # fmt: skip
    if tile is not None:
        from tokenmix_core.ops.gated_delta_rule.hopper.step import hopper_step_kernel

        hopper_step_kernel[(N * HV * (V // tile.BV),)](
            **arguments, state=state_out, BV=tile.BV, BK=tile.BK, L2NORM=x.qk_l2norm, num_warps=tile.num_warps
        )
        return o, state_out
    writes, write_chunk = (None, 0) if x.writes is None else (x.writes.contiguous(), x.write_chunk)
    step = T == 1 and x.cu_seqlens is None and writes is None
    launch = tuning.scan_tile("step" if step else "recurrent", K, V, q.element_size(), N * HV)
    recurrent_kernel[(N * HV * (V // launch.BV),)](
        **arguments, writes=writes, cu_seqlens=x.cu_seqlens, state_in=state_in, state_out=state_out, T=T, BV=launch.BV,
        WRITES=write_chunk, L2NORM=x.qk_l2norm, PACKED=x.cu_seqlens is not None, STEP=step, num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )  # fmt: skip
    return o, state_out
