"""States and outputs: sequential over a sequence's chunks, parallel over sequences, value heads and tiles of V."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmix_core import tuning
from tokenmix_core.ops.gated_delta_rule.layout import CHUNK, SIZES, chunk_slots, dot_precision, sequences
from tokenmix_core.tile.decay import causal_decay
from tokenmix_core.tile.memory import column, inverse_norm, last_of, load_rows, store_rows
from tokenmix_core.tile.sequences import first_chunk, sequence_span


@triton.jit
def add_chunk(b_o, b_q, b_k, b_r, b_b, b_w, o_t, L2NORM: tl.constexpr, DOT: tl.constexpr):
    """Outputs before the scale, from what the state before the chunk gave: + P' R with P' = tril(Q Kᵀ ⊙ Γ) diag(β)."""
    b_p = tl.dot(b_q, tl.trans(b_k), input_precision=DOT)
    b_p *= causal_decay(b_b, b_b, o_t, o_t) * b_w[None, :]
    b_o = tl.dot(b_p.to(b_k.dtype), b_r.to(b_k.dtype), b_o, input_precision=DOT)
    if L2NORM:
        b_o *= inverse_norm(b_q, DOT)[:, None]
    return b_o


@triton.jit(do_not_specialize=SIZES)
def forward_kernel(
    q, k, v, inverse, gates, initial_state, cu_seqlens, readout, o, final_state, states, residual,
    scale, T, H, group, tokens,
    K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr, OUTPUT: tl.constexpr, SAVE: tl.constexpr,
    INITIAL: tl.constexpr, L2NORM: tl.constexpr, PACKED: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """With OUTPUT outputs and final states; with SAVE, for the backward pass, R and the state entering each chunk."""
    i_v, i_nh = tl.program_id(0) % (V // BV), tl.program_id(0) // (V // BV)
    HV = H * group
    i_n, i_hv = i_nh // HV, i_nh % HV
    begin, length = sequence_span(i_n, T, cu_seqlens, PACKED)
    slot = first_chunk(i_n, begin, T, BT, PACKED)
    o_t, o_k, o_v = tl.arange(0, BT), tl.arange(0, K), tl.arange(0, BV)
    p_tile = o_k[:, None] * V + i_v * BV + o_v[None, :]

    p_q, p_k = q + (begin * H + i_hv // group) * K, k + (begin * H + i_hv // group) * K
    p_v, p_o = v + (begin * HV + i_hv) * V + i_v * BV, o + (begin * HV + i_hv) * V + i_v * BV
    p_r = residual + (begin * HV + i_hv) * V + i_v * BV
    p_a = inverse + (begin * HV + i_hv) * BT
    p_gates = gates + (i_hv.to(tl.int64) * tokens + begin) * 4
    p_s = states + (slot.to(tl.int64) * HV + i_hv) * K * V

    if INITIAL:
        b_s = tl.load(initial_state + i_nh.to(tl.int64) * K * V + p_tile).to(tl.float32)
    else:
        b_s = tl.zeros([K, BV], tl.float32)

    for start in range(0, length, BT):
        rows = length - start
        b_k = load_rows(p_k, H * K, rows, BT, K)
        b_v = load_rows(p_v, HV * V, rows, BT, BV)
        b_a = load_rows(p_a, HV * BT, rows, BT, BT)
        # past the end b stays at its last value, so that no difference is positive
        b_gates = load_rows(p_gates, 4, rows, BT, 4)
        b_b = column(b_gates, 0)
        b_last = last_of(b_b, rows, BT)
        b_b = tl.where(o_t < rows, b_b, b_last)
        b_w, r_k = column(b_gates, 1), column(b_gates, 2)
        b_h = b_s.to(k.dtype.element_ty)
        if SAVE:
            tl.store(p_s + p_tile, b_h)

        # R = Ã (V − γ ⊙ K S)
        b_y = tl.dot(b_k, b_h, input_precision=DOT) * -(tl.exp2(b_b) * r_k)[:, None] + b_v.to(tl.float32)
        if OUTPUT and readout is None:
            b_q = load_rows(p_q, H * K, rows, BT, K)
            b_o = tl.dot(b_q, b_h, input_precision=DOT) * tl.exp2(b_b)[:, None]
        b_r = tl.dot(b_a, b_y.to(k.dtype.element_ty), input_precision=DOT)
        if SAVE:
            store_rows(p_r, b_r, HV * V, rows, BT, BV)

        # O = scale (γ ⊙ Q S + P' R)
        if OUTPUT and readout is None:
            b_o = add_chunk(b_o, b_q, b_k, b_r, b_b, b_w, o_t, L2NORM, DOT)
            store_rows(p_o, b_o * scale, HV * V, rows, BT, BV)
        elif OUTPUT:
            # outputs are zero unless written
            m_o = tl.load(readout + begin + start + o_t, mask=o_t < rows, other=0) != 0
            if tl.max(m_o.to(tl.int32)) > 0:
                b_q = load_rows(p_q, H * K, rows, BT, K)
                b_o = tl.dot(b_q, b_h, input_precision=DOT) * tl.exp2(b_b)[:, None]
                b_o = add_chunk(b_o, b_q, b_k, b_r, b_b, b_w, o_t, L2NORM, DOT)
                store_rows(p_o, tl.where(m_o[:, None], b_o, 0.0) * scale, HV * V, rows, BT, BV)

        # S ← 2^b_last S + Kᵀ (2^(b_last − b) β ⊙ R)
        b_r = (b_r * (b_w * tl.exp2(b_last - b_b))[:, None]).to(k.dtype.element_ty)
        b_s = tl.dot(tl.trans(b_k), b_r, b_s * tl.exp2(b_last), input_precision=DOT)

        p_q += BT * H * K
        p_k += BT * H * K
        p_v += BT * HV * V
        p_o += BT * HV * V
        p_r += BT * HV * V
        p_a += BT * HV * BT
        p_gates += BT * 4
        p_s += HV * K * V

    if OUTPUT:
        tl.store(final_state + i_nh.to(tl.int64) * K * V + p_tile, b_s)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    inverse: Tensor,
    gates: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    qk_l2norm: bool,
    *,
    save: bool,
    readout: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Outputs (0 where `readout` is False) and final states.

    With `save` R, like v, and the state entering each chunk, in v's dtype.
    """
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    N = sequences(q, cu_seqlens)
    out = torch.empty_like(v) if readout is None else torch.zeros_like(v)
    if save:
        states = v.new_empty(chunk_slots(q, cu_seqlens), HV, K, V)
    else:
        states = v.new_empty(N, HV, K, V, dtype=torch.float32)
    launch = tuning.gated_delta_rule("states" if save else "forward", K, V, q.element_size(), N * HV)
    # pointers that a flag leaves unused still need a tensor to point at
    forward_kernel[(N * HV * (V // launch.BV),)](
        q, k, v, inverse, gates, gates if initial_state is None else initial_state, cu_seqlens, readout, out, states,
        states, out, scale, T, H, HV // H, B * T,
        K, V, CHUNK, launch.BV, not save, save, initial_state is not None, qk_l2norm, cu_seqlens is not None,
        dot_precision(q), num_warps=launch.num_warps, num_stages=launch.num_stages,
    )  # fmt: skip
    return out, states
