"""Token by token, the state in registers: for decoding and short inputs."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmix_core import tuning
from tokenmix_core.ops.gated_delta_rule.layout import SIZES
from tokenmix_core.tile.launch import cached_launch
from tokenmix_core.tile.sequences import sequence_span


@cached_launch
@triton.jit(do_not_specialize=SIZES)
def recurrent_kernel(
    q, k, v, g, beta, cu_seqlens, o, state_in, state_out, scale, T, H, group,
    K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, INITIAL: tl.constexpr, L2NORM: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """A sequence, value head and tile of V a program, which reads its tile first: `state_out` may be `state_in`."""
    i_v, i_nh = tl.program_id(0) % (V // BV), tl.program_id(0) // (V // BV)
    HV = H * group
    i_n, i_hv = i_nh // HV, i_nh % HV
    begin, length = sequence_span(i_n, T, cu_seqlens, PACKED)
    o_k, o_v = tl.arange(0, K), i_v * BV + tl.arange(0, BV)
    p_state = i_nh.to(tl.int64) * K * V + o_k[:, None] * V + o_v[None, :]
    if INITIAL:
        b_s = tl.load(state_in + p_state).to(tl.float32)
    else:
        b_s = tl.zeros([K, BV], tl.float32)

    o_qk, o_vo, o_g = (begin * H + i_hv // group) * K, (begin * HV + i_hv) * V, begin * HV + i_hv
    for _ in range(length):
        b_q, b_k = tl.load(q + o_qk + o_k).to(tl.float32), tl.load(k + o_qk + o_k).to(tl.float32)
        if L2NORM:
            b_q *= tl.rsqrt(tl.sum(b_q * b_q, 0) + 1e-6)
            b_k *= tl.rsqrt(tl.sum(b_k * b_k, 0) + 1e-6)
        decay, beta_t = tl.exp(tl.load(g + o_g).to(tl.float32)), tl.load(beta + o_g).to(tl.float32)
        # both read-outs of the old state at once; the output's part of the update is (k · q) u
        b_sk, b_sq = tl.sum(b_s * b_k[:, None], 0), tl.sum(b_s * b_q[:, None], 0)
        b_u = (tl.load(v + o_vo + o_v).to(tl.float32) - decay * b_sk) * beta_t
        b_s = b_s * decay + b_k[:, None] * b_u[None, :]
        b_o = scale * (decay * b_sq + tl.sum(b_k * b_q, 0) * b_u)
        tl.store(o + o_vo + o_v, b_o.to(o.dtype.element_ty))
        o_qk += H * K
        o_vo += HV * V
        o_g += HV
    tl.store(state_out + p_state, b_s)


def recurrent_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    qk_l2norm: bool,
    state_out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Outputs and final states; the latter go to `state_out`, which may be `initial_state`, where it is given."""
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    N = B if cu_seqlens is None else cu_seqlens.numel() - 1
    q, k, v, g, beta = (x.contiguous() for x in (q, k, v, g, beta))
    o = torch.empty_like(v)
    if state_out is None:
        state_out = q.new_empty(N, HV, K, V, dtype=torch.float32)
        initial_state = None if initial_state is None else initial_state.contiguous()
    launch = tuning.gated_delta_rule("recurrent", K, V, q.element_size(), N * HV)
    recurrent_kernel[(N * HV * (V // launch.BV),)](
        q, k, v, g, beta, cu_seqlens, o, initial_state if initial_state is not None else state_out, state_out,
        scale, T, H, HV // H, K, V, launch.BV, initial_state is not None, qk_l2norm, cu_seqlens is not None,
        num_warps=launch.num_warps, num_stages=launch.num_stages,
    )  # fmt: skip
    return o, state_out
