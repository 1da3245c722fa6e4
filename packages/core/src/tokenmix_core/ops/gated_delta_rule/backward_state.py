"""Gradients of states and values by a reverse scan over a sequence's chunks (Triton); README.md defines the letters."""

import torch
import triton
import triton.language as tl

from tokenmix_core.chunking import chunk_slots, num_sequences
from tokenmix_core.kernels.launch.launcher import cached_launch
from tokenmix_core.kernels.triton.decay import causal_decay_transposed
from tokenmix_core.kernels.triton.memory import column, inverse_norm, last_of, load_rows, store_rows
from tokenmix_core.kernels.triton.varlen import first_chunk, sequence_span
from tokenmix_core.ops.gated_delta_rule import tuning
from tokenmix_core.ops.gated_delta_rule.constants import CHUNK, SIZES, dot_precision
from tokenmix_core.ops.gated_delta_rule.plan import Form
from tokenmix_core.ops.gated_delta_rule.types import Reverse, StateGradients, WriteGradients


@cached_launch
@triton.jit(do_not_specialize=SIZES)
def backward_state_kernel(
    q, k, inverse, gates, writes, cu_seqlens, residual, states, remainders, do, dfinal_state, dv, dstates, ends,
    dwrites, bare_ends, dinitial_state, scale, T, H, group, tokens,
    K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr, WRITES: tl.constexpr, L2NORM: tl.constexpr,
    PACKED: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Compute dV, the gradient dS' of the state leaving each chunk, and ⟨dS', S⟩ over this program's columns of V.

    S is the state entering the chunk. `do`, `dfinal_state`, `dinitial_state` and `remainders` may be None. WRITES
    consecutive chunks share a factor in `writes`. If WRITES > 1, also compute, over this program's columns, the
    factor's gradient, and `bare_ends`: the gradient through the state without the writes of these chunks, which is
    added, as the same value, to the gradient of each of their log-decays.
    """
    i_v, i_nh = tl.program_id(0) % (V // BV), tl.program_id(0) // (V // BV)
    HV = H * group
    i_n, i_hv = i_nh // HV, i_nh % HV
    bos, length = sequence_span(i_n, T, cu_seqlens, PACKED)
    slot = first_chunk(i_n, bos, T, BT, PACKED)
    o_t, o_k, o_v = tl.arange(0, BT), tl.arange(0, K), tl.arange(0, BV)
    p_tile = o_k[:, None] * V + i_v * BV + o_v[None, :]

    if dfinal_state is not None:
        b_ds = tl.load(dfinal_state + i_nh.to(tl.int64) * K * V + p_tile).to(tl.float32)
    else:
        b_ds = tl.zeros([K, BV], tl.float32)

    NT = tl.cdiv(length, BT)
    # b_bare: gradient of the state without the writes of the WRITES chunks that share the current factor; only decays
    # change it
    if WRITES > 1:
        b_bare, b_dwrite = b_ds, tl.zeros([BT], tl.float32)
    for i_c in range(NT):
        start = (NT - 1 - i_c) * BT
        if WRITES:
            i_w = (first_chunk(i_n, bos, T, BT * WRITES, PACKED) + start // (BT * WRITES)).to(tl.int64) * HV + i_hv
            share = tl.load(writes + i_w).to(tl.float32)
        # a compile-time condition stays on its own line: Triton would evaluate it at run time if `and` joined the two
        if WRITES > 1:  # noqa: SIM102
            if (i_c == 0) | ((start // BT + 1) % WRITES == 0):
                b_bare, b_dwrite = b_ds, tl.zeros([BT], tl.float32)
                b_ds *= share
        first, rows = bos + start, length - start
        o_qk, o_vo = (first * H + i_hv // group) * K, (first * HV + i_hv) * V + i_v * BV
        b_k = load_rows(k + o_qk, H * K, rows, BT, K)
        b_q = load_rows(q + o_qk, H * K, rows, BT, K)
        b_a = load_rows(inverse + (first * HV + i_hv) * BT, HV * BT, rows, BT, BT)
        p_gates = gates + (i_hv.to(tl.int64) * tokens + first) * 4
        b_gates = load_rows(p_gates, 4, rows, BT, 4)
        b_b = column(b_gates, 0)
        b_last = last_of(b_b, rows, BT)
        b_b = tl.where(o_t < rows, b_b, b_last)
        b_w, r_k = column(b_gates, 1), column(b_gates, 2)
        b_writes = b_w * tl.exp2(b_last - b_b)
        if WRITES == 1:
            b_writes *= share
        r_q = tl.zeros([BT], tl.float32) + scale
        if L2NORM:
            r_q *= inverse_norm(b_q, DOT)
        b_dh = b_ds.to(k.dtype.element_ty)
        o_state = (slot + (NT - 1 - i_c)).to(tl.int64) * HV + i_hv
        tl.store(dstates + o_state * K * V + p_tile, b_dh)
        # dS' is in float32, and S includes its saved rounding error: the terms of ⟨dS', S⟩ cancel, so the error of
        # 16-bit operands would dominate the sum
        b_s = tl.load(states + o_state * K * V + p_tile).to(tl.float32)
        if remainders is not None:
            b_s += tl.load(remainders + o_state * K * V + p_tile).to(tl.float32)
        tl.store(ends + o_state * (V // BV) + i_v, tl.sum(tl.sum(b_s * b_ds, 1), 0))
        if WRITES > 1:
            b_r = load_rows(residual + o_vo, HV * V, rows, BT, BV).to(tl.float32)
            b_kd = tl.dot(b_k, b_bare.to(k.dtype.element_ty), input_precision=DOT)
            b_dwrite += tl.sum(b_kd * b_r, 1) * b_writes
            b_bare *= tl.exp2(b_last)
            b_end = tl.sum(tl.sum(b_s * b_bare, 1), 0) * (1.0 - share)

        # dR = scale P'ᵀ dO + 2^(b_last − b) β ⊙ (K dS'), where P' are the scores with decay and β; dV = dY = Ãᵀ dR
        b_dr = tl.dot(b_k, b_dh, input_precision=DOT) * b_writes[:, None]
        if do is not None:
            b_do = load_rows(do + o_vo, HV * V, rows, BT, BV)
            b_p = tl.dot(b_k, tl.trans(b_q), input_precision=DOT)
            b_p *= causal_decay_transposed(b_b, b_b, o_t, o_t) * b_w[:, None] * r_q[None, :]
            b_dr += tl.dot(b_p.to(k.dtype.element_ty), b_do, input_precision=DOT)
        b_dy = tl.dot(tl.trans(b_a), b_dr.to(k.dtype.element_ty), input_precision=DOT)
        store_rows(dv + o_vo, b_dy, HV * V, rows, BT, BV)

        # dS = 2^b_last dS' + scale Qᵀ (γ ⊙ dO) − Kᵀ (γ ⊙ dY), the gradient of the state entering the chunk; γ = 2^b
        b_g = tl.exp2(b_b)
        b_ds *= tl.exp2(b_last)
        if do is not None:
            b_do = (b_do.to(tl.float32) * (b_g * r_q)[:, None]).to(k.dtype.element_ty)
            b_ds = tl.dot(tl.trans(b_q), b_do, b_ds, input_precision=DOT)
        b_dy = (b_dy * -(b_g * r_k)[:, None]).to(k.dtype.element_ty)
        b_ds = tl.dot(tl.trans(b_k), b_dy, b_ds, input_precision=DOT)
        if WRITES > 1:  # noqa: SIM102
            if (start // BT) % WRITES == 0:
                b_ds += (1.0 - share) * b_bare
                tl.store(dwrites + i_w * (V // BV) + i_v, tl.sum(b_dwrite, 0))
                tl.store(bare_ends + i_w * (V // BV) + i_v, b_end)

    if dinitial_state is not None:
        tl.store(dinitial_state + i_nh.to(tl.int64) * K * V + p_tile, b_ds)


def backward_state(reverse: Reverse, form: Form) -> StateGradients:
    """Return the gradients of states and values, by the Triton or Gluon kernel `form`; Gluon kernels need `do`."""
    x, terms, saved, do, dfinal_state, _ = reverse
    B, T, H, K = x.q.shape
    HV, V = x.v.shape[2:]
    N = num_sequences(x.q, x.cu_seqlens)
    dv, dstates = torch.empty_like(x.v), x.v.new_empty(chunk_slots(B, T, CHUNK, x.cu_seqlens), HV, K, V)
    dinitial_state = None if x.initial_state is None else torch.empty_like(x.initial_state)
    if form != "triton":
        assert do is not None, "kernels in Gluon need a gradient of the outputs"
        of_states = StateGradients(dv, dstates, terms.gates.new_empty(len(dstates), HV, V), dinitial_state, None)
        if form == "gluon":
            from tokenmix_core.ops.gated_delta_rule.hopper import backward_state as on_hopper

            on_hopper.backward_state(reverse, of_states)
        else:
            from tokenmix_core.ops.gated_delta_rule.hopper import backward_state_tiled as by_tiles

            by_tiles.backward_state_tiled(reverse, of_states)
        return of_states
    launch = tuning.scan_tile("backward_state", K, V, x.q.element_size(), N * HV)
    parts = V // launch.BV
    ends, of_writes = terms.gates.new_empty(len(dstates), HV, parts), None
    if x.writes is not None and x.chunks_per_write > 1:
        # zeros, because in a packed batch some entries belong to no chunk and no kernel writes them
        of_writes = WriteGradients(*(terms.gates.new_zeros(*x.writes.shape, parts) for _ in range(2)))
    dwrites, bare_ends = of_writes or (None, None)
    backward_state_kernel[(N * HV * parts,)](
        q=x.q, k=x.k, inverse=terms.inverse, gates=terms.gates, writes=x.writes, cu_seqlens=x.cu_seqlens,
        residual=saved.residual, states=saved.states, remainders=saved.remainders, do=do, dfinal_state=dfinal_state,
        dv=dv, dstates=dstates, ends=ends, dwrites=dwrites, bare_ends=bare_ends, dinitial_state=dinitial_state,
        scale=x.scale, T=T, H=H, group=HV // H, tokens=B * T, K=K, V=V, BT=CHUNK, BV=launch.BV,
        WRITES=x.chunks_per_write, L2NORM=x.qk_l2norm, PACKED=x.cu_seqlens is not None, DOT=dot_precision(x.q),
        num_warps=launch.num_warps, num_stages=launch.num_stages, maxnreg=launch.maxnreg,
    )  # fmt: skip
    return StateGradients(dv, dstates, ends, dinitial_state, of_writes)
