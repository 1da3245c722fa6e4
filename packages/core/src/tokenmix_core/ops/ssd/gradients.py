"""All gradients of a chunk at once, from the state before it and the gradient of the state after it."""

import torch
import triton
import triton.language as tl

from tokenmix_core.chunking import chunk_slots
from tokenmix_core.tile.decay import causal_decay, causal_decay_transposed, load_decay
from tokenmix_core.tile.sequences import locate_chunk
from tokenmix_core.tuning import SSDGradients


@triton.jit
def load_tokens(p_rows, stride, m_t, BT: tl.constexpr, BD: tl.constexpr):
    """A tile `[BT, BD]` of rows that lie `stride` elements apart, zero where masked."""
    p_x = p_rows + tl.arange(0, BT)[:, None] * stride + tl.arange(0, BD)[None, :]
    return tl.load(p_x, mask=m_t[:, None], other=0.0)


@triton.jit
def chunk_products(
    p_q, p_k, p_v, p_do, b_b, m_t, stride_q, stride_k, stride_v, stride_do, scale,
    K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, CK: tl.constexpr, CV: tl.constexpr,
):  # fmt: skip
    """Scores P and their gradient dP with decays, `[queries, keys]`, and dPᵀ by its own product.

    All three become right operands; a transposed tensor-core result is never one.
    """
    o_i = tl.arange(0, BT)
    b_p = tl.zeros([BT, BT], tl.float32)
    for i_c in range(K // CK):
        b_q = load_tokens(p_q + i_c * CK, stride_q, m_t, BT, CK)
        b_k = load_tokens(p_k + i_c * CK, stride_k, m_t, BT, CK)
        b_p = tl.dot(b_q, tl.trans(b_k), b_p, input_precision="tf32x3")
    b_dp = tl.zeros([BT, BT], tl.float32)
    b_dpt = tl.zeros([BT, BT], tl.float32)
    for i_c in range(V // CV):
        b_v = load_tokens(p_v + i_c * CV, stride_v, m_t, BT, CV)
        b_do = load_tokens(p_do + i_c * CV, stride_do, m_t, BT, CV)
        b_dp = tl.dot(b_do, tl.trans(b_v), b_dp, input_precision="tf32x3")
        b_dpt = tl.dot(b_v, tl.trans(b_do), b_dpt, input_precision="tf32x3")
    b_gamma = causal_decay(b_b, b_b, o_i, o_i) * scale
    b_m = tl.where(o_i[:, None] > o_i[None, :], b_p * b_dp * b_gamma, 0.0)
    b_dpt *= causal_decay_transposed(b_b, b_b, o_i, o_i) * scale
    return b_p * b_gamma, b_dp * b_gamma, b_dpt, tl.sum(b_m, 1) - tl.sum(b_m, 0)


@triton.jit
def value_gradient(
    p_k, p_do, p_d, p_dv, b_p, b_to_end, m_t, stride_k, stride_do, stride_dv,
    K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr, CK: tl.constexpr,
):  # fmt: skip
    """Store dv = Pᵀ do + e^(total − b) Dᵀ k, transposed, BV rows at a time."""
    o_k = tl.arange(0, CK)
    o_v = tl.arange(0, BV)
    for i_v in range(V // BV):
        b_dv = tl.zeros([BV, BT], tl.float32)
        for i_c in range(K // CK):
            b_k = load_tokens(p_k + i_c * CK, stride_k, m_t, BT, CK)
            b_d = tl.load(p_d + (i_c * CK + o_k)[:, None] * V + (i_v * BV + o_v)[None, :])
            b_dv = tl.dot(tl.trans(b_d), tl.trans(b_k), b_dv, input_precision="tf32x3")
        b_do = load_tokens(p_do + i_v * BV, stride_do, m_t, BT, BV)
        b_dv = tl.dot(tl.trans(b_do), b_p, b_dv * b_to_end[None, :], input_precision="tf32x3")
        store_transposed(p_dv + i_v * BV, b_dv, stride_dv, m_t, BV, BT)


@triton.jit
def store_transposed(p_rows, b_x, stride, m_t, BD: tl.constexpr, BT: tl.constexpr):
    """Store `[BD, BT]` as BT rows that lie `stride` elements apart."""
    p_x = p_rows + tl.arange(0, BT)[None, :] * stride + tl.arange(0, BD)[:, None]
    tl.store(p_x, b_x.to(p_rows.dtype.element_ty), mask=m_t[None, :])


@triton.jit
def query_key_gradient(
    p_q, p_k, p_v, p_do, p_s, p_d, b_dp, b_dpt, b_from_start, b_to_end, m_t,
    stride_q, stride_k, stride_v, stride_do,
    V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, CV: tl.constexpr,
):  # fmt: skip
    """BK rows of dqᵀ and dkᵀ, and what they add to the decay's gradient: q · dq, k · dk across the border, ⟨S, D⟩."""
    o_s = tl.arange(0, BK)[:, None] * V + tl.arange(0, CV)[None, :]
    b_dq = tl.zeros([BK, BT], tl.float32)
    b_dk = tl.zeros([BK, BT], tl.float32)
    b_sd = 0.0
    for i_c in range(V // CV):
        b_s = tl.load(p_s + i_c * CV + o_s)
        b_d = tl.load(p_d + i_c * CV + o_s)
        b_sd += tl.sum(b_s.to(tl.float32) * b_d.to(tl.float32))
        b_do = load_tokens(p_do + i_c * CV, stride_do, m_t, BT, CV)
        b_dq = tl.dot(b_s, tl.trans(b_do), b_dq, input_precision="tf32x3")
        b_v = load_tokens(p_v + i_c * CV, stride_v, m_t, BT, CV)
        b_dk = tl.dot(b_d, tl.trans(b_v), b_dk, input_precision="tf32x3")
    b_q = load_tokens(p_q, stride_q, m_t, BT, BK)
    b_k = load_tokens(p_k, stride_k, m_t, BT, BK)
    b_dq *= b_from_start[None, :]
    b_dk *= b_to_end[None, :]
    b_query = tl.sum(b_dq * tl.trans(b_q).to(tl.float32), 0)
    b_key = tl.sum(b_dk * tl.trans(b_k).to(tl.float32), 0)
    b_dq = tl.dot(tl.trans(b_k), b_dpt, b_dq, input_precision="tf32x3")
    b_dk = tl.dot(tl.trans(b_q), b_dp, b_dk, input_precision="tf32x3")
    return b_dq, b_dk, b_query, b_key, b_sd


@triton.jit
def decay_gradient(b_inside, b_query, b_key, b_state, BT: tl.constexpr):
    """dg_t = Σ_{i ≥ t} (inside + query)_i + Σ_{j < t} key_j + state: every path that crosses the decay of t."""
    o_i = tl.arange(0, BT)
    b_suffix = tl.cumsum(b_inside + b_query, 0, reverse=True)
    # a masked sum rather than a cumulative one less its last term, so that what is zero stays exactly zero
    b_prefix = tl.sum(tl.where(o_i[None, :] < o_i[:, None], b_key[None, :], 0.0), 1)
    return b_suffix + b_prefix + b_state


@triton.jit(do_not_specialize=["T", "N", "G", "HV"])
def ssd_gradients_kernel(
    q, k, v, do, g, states, gradients, dq, dk, dv, dg, cu_seqlens,
    stride_q, stride_k, stride_v, stride_do, scale, T, N, G, HV,
    K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    CK: tl.constexpr, CV: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """One head of one chunk: dv, dg and the head's dq and dk, `[B, T, HV, K]`."""
    i_c = tl.program_id(0) // HV
    i_h = tl.program_id(0) % HV
    _, begin, length, first = locate_chunk(i_c, T, BT, N, cu_seqlens, PACKED)
    if first >= length:
        return
    begin += first
    i_g = i_h // (HV // G)
    m_t = tl.arange(0, BT) < length - first
    p_q = q + begin * stride_q + i_g * K
    p_k = k + begin * stride_k + i_g * K
    p_v = v + begin * stride_v + i_h * V
    p_do = do + begin * stride_do + i_h * V
    p_g = begin * HV + i_h + tl.arange(0, BT) * HV
    o_state = (i_c.to(tl.int64) * HV + i_h) * K * V
    o_dqk = (begin * HV + i_h) * K

    b_g = load_decay(g + p_g, m_t)
    b_b = tl.cumsum(b_g, 0)
    b_total = tl.sum(b_g, 0)
    b_to_end = tl.exp2(b_total - b_b)
    b_p, b_dp, b_dpt, b_inside = chunk_products(
        p_q, p_k, p_v, p_do, b_b, m_t, stride_q, stride_k, stride_v, stride_do, scale, K, V, BT, CK, CV
    )
    value_gradient(
        p_k, p_do, gradients + o_state, dv + (begin * HV + i_h) * V, b_p.to(v.dtype.element_ty), b_to_end, m_t,
        stride_k, stride_do, HV * V, K, V, BT, BV, CK,
    )  # fmt: skip
    b_query = tl.zeros([BT], tl.float32)
    b_key = tl.zeros([BT], tl.float32)
    b_sd = 0.0
    for i_k in range(K // BK):
        b_dq, b_dk, b_query_part, b_key_part, b_sd_part = query_key_gradient(
            p_q + i_k * BK, p_k + i_k * BK, p_v, p_do,
            states + o_state + i_k * BK * V, gradients + o_state + i_k * BK * V,
            b_dp.to(v.dtype.element_ty), b_dpt.to(v.dtype.element_ty), tl.exp2(b_b) * scale, b_to_end, m_t,
            stride_q, stride_k, stride_v, stride_do, V, BT, BK, CV,
        )  # fmt: skip
        store_transposed(dq + o_dqk + i_k * BK, b_dq, HV * K, m_t, BK, BT)
        store_transposed(dk + o_dqk + i_k * BK, b_dk, HV * K, m_t, BK, BT)
        b_query += b_query_part
        b_key += b_key_part
        b_sd += b_sd_part
    b_dg = decay_gradient(b_inside, b_query, b_key, b_sd * tl.exp2(b_total), BT)
    tl.store(dg + p_g, b_dg, mask=m_t)


@triton.jit(do_not_specialize=["T", "N", "G", "HV", "heads"])
def ssd_group_gradients_kernel(
    q, k, v, do, g, states, gradients, dq, dk, dv, dg, cu_seqlens,
    stride_q, stride_k, stride_v, stride_do, scale, T, N, G, HV, heads, dg_block,
    K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    CK: tl.constexpr, CV: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """BK columns of dq and dk, `[B, T, HV / heads, K]`, summed over `heads` heads of a group.

    The program of the first columns stores dv too; each stores its part of dg.
    """
    BLOCKS: tl.constexpr = K // BK
    i_k = tl.program_id(0) % BLOCKS
    i_b = tl.program_id(0) // BLOCKS % (HV // heads)
    i_c = tl.program_id(0) // BLOCKS // (HV // heads)
    _, begin, length, first = locate_chunk(i_c, T, BT, N, cu_seqlens, PACKED)
    if first >= length:
        return
    begin += first
    i_g = i_b * heads // (HV // G)
    m_t = tl.arange(0, BT) < length - first
    p_q = q + begin * stride_q + i_g * K
    p_k = k + begin * stride_k + i_g * K
    b_dq = tl.zeros([BK, BT], tl.float32)
    b_dk = tl.zeros([BK, BT], tl.float32)
    for i_h in tl.range(i_b * heads, i_b * heads + heads, disable_licm=True):
        p_v = v + begin * stride_v + i_h * V
        p_do = do + begin * stride_do + i_h * V
        p_g = begin * HV + i_h + tl.arange(0, BT) * HV
        o_state = (i_c.to(tl.int64) * HV + i_h) * K * V
        b_g = load_decay(g + p_g, m_t)
        b_b = tl.cumsum(b_g, 0)
        b_total = tl.sum(b_g, 0)
        b_to_end = tl.exp2(b_total - b_b)
        b_p, b_dp, b_dpt, b_inside = chunk_products(
            p_q, p_k, p_v, p_do, b_b, m_t, stride_q, stride_k, stride_v, stride_do, scale, K, V, BT, CK, CV
        )
        if i_k == 0:
            value_gradient(
                p_k, p_do, gradients + o_state, dv + (begin * HV + i_h) * V, b_p.to(v.dtype.element_ty), b_to_end, m_t,
                stride_k, stride_do, HV * V, K, V, BT, BV, CK,
            )  # fmt: skip
        else:
            b_inside *= 0.0
        b_dq_head, b_dk_head, b_query, b_key, b_sd = query_key_gradient(
            p_q + i_k * BK, p_k + i_k * BK, p_v, p_do,
            states + o_state + i_k * BK * V, gradients + o_state + i_k * BK * V,
            b_dp.to(v.dtype.element_ty), b_dpt.to(v.dtype.element_ty), tl.exp2(b_b) * scale, b_to_end, m_t,
            stride_q, stride_k, stride_v, stride_do, V, BT, BK, CV,
        )  # fmt: skip
        b_dq += b_dq_head
        b_dk += b_dk_head
        b_dg = decay_gradient(b_inside, b_query, b_key, b_sd * tl.exp2(b_total), BT)
        tl.store(dg + i_k.to(tl.int64) * dg_block + p_g, b_dg, mask=m_t)
    o_dqk = (begin * (HV // heads) + i_b) * K + i_k * BK
    store_transposed(dq + o_dqk, b_dq, HV // heads * K, m_t, BK, BT)
    store_transposed(dk + o_dqk, b_dk, HV // heads * K, m_t, BK, BT)


def ssd_gradients(q, k, v, do, g, scale, states, gradients, cu_seqlens, config: SSDGradients):
    """dq, dk, dv and dg. Heads of a group are summed in registers, `config.heads` of them, the rest over a buffer."""
    B, T, G, K = q.shape
    HV, V = v.shape[2:]
    N = B if cu_seqlens is None else len(cu_seqlens) - 1
    BT, BK, BV, CK, CV, heads = config.BT, config.BK, config.BV, config.CK, config.CV, config.heads
    parts = HV // heads // G
    blocks = K // BK if heads > 1 else 1
    shape, dtype = (B, T, G * parts, K), q.dtype if parts == 1 else torch.float32
    dq = torch.empty(shape, dtype=dtype, device=q.device)
    dk = torch.empty(shape, dtype=dtype, device=q.device)
    dv = torch.empty_like(v, memory_format=torch.contiguous_format)
    dg = torch.empty((blocks, *g.shape), dtype=torch.float32, device=g.device)
    tensors = (q, k, v, do, g, states, gradients, dq, dk, dv, dg, cu_seqlens)
    sizes = (q.stride(1), k.stride(1), v.stride(1), do.stride(1), scale, T, N, G, HV)
    tiles = (K, V, BT, BK, BV, CK, CV, cu_seqlens is not None)
    launch = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    chunks = chunk_slots(B, T, BT, cu_seqlens)
    if heads == 1:
        ssd_gradients_kernel[(chunks * HV,)](*tensors, *sizes, *tiles, **launch)
    else:
        grid = (chunks * (HV // heads) * blocks,)
        ssd_group_gradients_kernel[grid](*tensors, *sizes, heads, g.numel(), *tiles, **launch)
    if parts > 1:
        dq, dk = (x.unflatten(2, (G, parts)).sum(3).to(q.dtype) for x in (dq, dk))
    return dq, dk, dv, (dg[0] if blocks == 1 else dg.sum(0)).to(g.dtype)
