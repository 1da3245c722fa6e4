"""Cumulative decays b, inverse key norms r and Ã = (I + L̃)⁻¹ of all chunks, in parallel; README.md defines L̃."""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from tokenmix_core.chunking import chunk_slots, num_sequences
from tokenmix_core.kernels.launch.launcher import cached_launch
from tokenmix_core.kernels.triton.decay import causal_decay, load_decay
from tokenmix_core.kernels.triton.memory import load_rows, load_vector, store_rows, store_vector
from tokenmix_core.kernels.triton.solve import inverse_64
from tokenmix_core.kernels.triton.varlen import locate_chunk
from tokenmix_core.ops.gated_delta_rule import tuning
from tokenmix_core.ops.gated_delta_rule.constants import CHUNK, SIZES, dot_precision, solve_precision, term_layouts
from tokenmix_core.ops.gated_delta_rule.plan import Form


@triton.jit
def block_gates(p_g, p_beta, p_gates, stride, rows, before, r_k):
    """Store log2 decays b, β r (r: the keys' inverse norms), r and β of 16 tokens; return b, β r, and the last b.

    b is cumulated from the chunk's start: `before` is the b of the token before these 16. The last b is the argument
    `before` of the next 16 tokens.
    """
    o_t = tl.arange(0, 16)
    b_g = load_decay(p_g + o_t * stride, o_t < rows)
    b_b = tl.cumsum(b_g, 0) + before
    b_beta = load_vector(p_beta, stride, rows, 16)
    store_vector(p_gates, b_b, 4, rows, 16)
    store_vector(p_gates + 1, b_beta * r_k, 4, rows, 16)
    store_vector(p_gates + 2, r_k, 4, rows, 16)
    store_vector(p_gates + 3, b_beta, 4, rows, 16)
    return b_b, b_beta * r_k, before + tl.sum(b_g, 0)


@triton.jit
def system(b_kk, b_bi, b_bj, r_i, w_j, DIAGONAL: tl.constexpr):
    """Return block (i, j) of L̃: (k_i · k_j) 2^(b_i − b_j) r_i w_j with w = β r; if DIAGONAL, 0 unless row > column."""
    if DIAGONAL:
        o_t = tl.arange(0, 16)
        b_decay = causal_decay(b_bi, b_bj, o_t, o_t + 1)
    else:
        b_decay = tl.exp2(b_bi[:, None] - b_bj[None, :])
    return b_kk * b_decay * r_i[:, None] * w_j[None, :]


@triton.jit
def squares(b_k):
    """Return Σ k² of each row of a tile."""
    b_k = b_k.to(tl.float32)
    return tl.sum(b_k * b_k, 1)


@cached_launch
@triton.jit(do_not_specialize=SIZES)
def prepare_kernel(
    k, g, beta, cu_seqlens, inverse, gates, T, N, H, group, tokens,
    K: tl.constexpr, BK: tl.constexpr, BT: tl.constexpr, L2NORM: tl.constexpr, PACKED: tl.constexpr,
    DOT: tl.constexpr, SOLVE: tl.constexpr,
):  # fmt: skip
    """Compute Ã, cumulative decays b, inverse key norms r, β r and β of a chunk for all value heads of a key head."""
    tl.static_assert(BT == 64)
    i_slot, i_h = tl.program_id(0), tl.program_id(1)
    _, bos, length, start = locate_chunk(i_slot, T, BT, N, cu_seqlens, PACKED)
    if start >= length:
        return
    first, rows = bos + start, length - start
    HV = H * group

    # k_i · k_j in blocks of 16 tokens, and the norms, are computed once for all value heads of this key head
    zero = tl.zeros([16, 16], tl.float32)
    k_00, k_10, k_11, k_20, k_21 = zero, zero, zero, zero, zero
    k_22, k_30, k_31, k_32, k_33 = zero, zero, zero, zero, zero
    n_0 = tl.zeros([16], tl.float32)
    n_1, n_2, n_3 = n_0, n_0, n_0
    s_k = H * K
    for i_k in range(K // BK):
        p_k = k + (first * H + i_h) * K + i_k * BK
        b_0 = load_rows(p_k, s_k, rows, 16, BK)
        b_1 = load_rows(p_k + 16 * s_k, s_k, rows - 16, 16, BK)
        b_2 = load_rows(p_k + 32 * s_k, s_k, rows - 32, 16, BK)
        b_3 = load_rows(p_k + 48 * s_k, s_k, rows - 48, 16, BK)
        k_00 = tl.dot(b_0, tl.trans(b_0), k_00, input_precision=DOT)
        k_10 = tl.dot(b_1, tl.trans(b_0), k_10, input_precision=DOT)
        k_20 = tl.dot(b_2, tl.trans(b_0), k_20, input_precision=DOT)
        k_30 = tl.dot(b_3, tl.trans(b_0), k_30, input_precision=DOT)
        k_11 = tl.dot(b_1, tl.trans(b_1), k_11, input_precision=DOT)
        k_21 = tl.dot(b_2, tl.trans(b_1), k_21, input_precision=DOT)
        k_31 = tl.dot(b_3, tl.trans(b_1), k_31, input_precision=DOT)
        k_22 = tl.dot(b_2, tl.trans(b_2), k_22, input_precision=DOT)
        k_32 = tl.dot(b_3, tl.trans(b_2), k_32, input_precision=DOT)
        k_33 = tl.dot(b_3, tl.trans(b_3), k_33, input_precision=DOT)
        if L2NORM:
            n_0, n_1, n_2, n_3 = n_0 + squares(b_0), n_1 + squares(b_1), n_2 + squares(b_2), n_3 + squares(b_3)
    r_0 = tl.full([16], 1.0, tl.float32)
    r_1, r_2, r_3 = r_0, r_0, r_0
    if L2NORM:
        r_0, r_1, r_2, r_3 = tl.rsqrt(n_0 + 1e-6), tl.rsqrt(n_1 + 1e-6), tl.rsqrt(n_2 + 1e-6), tl.rsqrt(n_3 + 1e-6)

    for i_g in range(group):
        i_hv = i_h * group + i_g
        p_g, p_beta = g + first * HV + i_hv, beta + first * HV + i_hv
        p_gates = gates + (i_hv.to(tl.int64) * tokens + first) * 4
        b_0, w_0, end = block_gates(p_g, p_beta, p_gates, HV, rows, 0.0, r_0)
        b_1, w_1, end = block_gates(p_g + 16 * HV, p_beta + 16 * HV, p_gates + 64, HV, rows - 16, end, r_1)
        b_2, w_2, end = block_gates(p_g + 32 * HV, p_beta + 32 * HV, p_gates + 128, HV, rows - 32, end, r_2)
        b_3, w_3, end = block_gates(p_g + 48 * HV, p_beta + 48 * HV, p_gates + 192, HV, rows - 48, end, r_3)
        a_00, a_10, a_11, a_20, a_21, a_22, a_30, a_31, a_32, a_33 = inverse_64(
            (
                system(k_00, b_0, b_0, r_0, w_0, True),
                system(k_10, b_1, b_0, r_1, w_0, False),
                system(k_11, b_1, b_1, r_1, w_1, True),
                system(k_20, b_2, b_0, r_2, w_0, False),
                system(k_21, b_2, b_1, r_2, w_1, False),
                system(k_22, b_2, b_2, r_2, w_2, True),
                system(k_30, b_3, b_0, r_3, w_0, False),
                system(k_31, b_3, b_1, r_3, w_1, False),
                system(k_32, b_3, b_2, r_3, w_2, False),
                system(k_33, b_3, b_3, r_3, w_3, True),
            ),
            SOLVE,
        )
        s_a = HV * BT
        p_a = inverse + (first * HV + i_hv) * BT
        store_rows(p_a, a_00, s_a, rows, 16, 16)
        store_rows(p_a + 16, zero, s_a, rows, 16, 16)
        store_rows(p_a + 32, zero, s_a, rows, 16, 16)
        store_rows(p_a + 48, zero, s_a, rows, 16, 16)
        p_a += 16 * s_a
        store_rows(p_a, a_10, s_a, rows - 16, 16, 16)
        store_rows(p_a + 16, a_11, s_a, rows - 16, 16, 16)
        store_rows(p_a + 32, zero, s_a, rows - 16, 16, 16)
        store_rows(p_a + 48, zero, s_a, rows - 16, 16, 16)
        p_a += 16 * s_a
        store_rows(p_a, a_20, s_a, rows - 32, 16, 16)
        store_rows(p_a + 16, a_21, s_a, rows - 32, 16, 16)
        store_rows(p_a + 32, a_22, s_a, rows - 32, 16, 16)
        store_rows(p_a + 48, zero, s_a, rows - 32, 16, 16)
        p_a += 16 * s_a
        store_rows(p_a, a_30, s_a, rows - 48, 16, 16)
        store_rows(p_a + 16, a_31, s_a, rows - 48, 16, 16)
        store_rows(p_a + 32, a_32, s_a, rows - 48, 16, 16)
        store_rows(p_a + 48, a_33, s_a, rows - 48, 16, 16)


def prepare(
    k: Tensor,
    g: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor | None,
    qk_l2norm: bool,
    form: Form,
    out: Sequence[Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return Ã `[B, T, HV, C]` in k's dtype, and the gates b, β r, r and β `[HV, B · T, 4]` in float32.

    b: log2 of the decays, cumulated inside a chunk; r: inverse key norms, 1 unless `qk_l2norm`. `form` selects the
    kernel (see `plan.Form`). If `out` is given, its two tensors receive the results.
    """
    B, T, H, K = k.shape
    HV = g.shape[2]
    inverse, gates = out or (k.new_empty(shape, dtype=dtype) for shape, dtype in term_layouts(k, HV))
    if form == "gluon":
        from tokenmix_core.ops.gated_delta_rule.hopper import prepare as on_hopper

        on_hopper.prepare(k=k, g=g, beta=beta, cu_seqlens=cu_seqlens, qk_l2norm=qk_l2norm, inverse=inverse, gates=gates)
        return inverse, gates
    launch = tuning.scan_tile("prepare", K, K, k.element_size(), B * HV)
    prepare_kernel[(chunk_slots(B, T, CHUNK, cu_seqlens), H)](
        k=k, g=g, beta=beta, cu_seqlens=cu_seqlens, inverse=inverse, gates=gates, T=T, N=num_sequences(k, cu_seqlens),
        H=H, group=HV // H, tokens=B * T, K=K, BK=launch.BV, BT=CHUNK, L2NORM=qk_l2norm, PACKED=cu_seqlens is not None,
        DOT=dot_precision(k), SOLVE=solve_precision(k), num_warps=launch.num_warps, num_stages=launch.num_stages,
    )  # fmt: skip
    return inverse, gates
