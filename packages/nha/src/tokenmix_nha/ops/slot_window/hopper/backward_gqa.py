"""Gradients of a weak chunk's tokens from all query heads of a GQA group, one head per iteration, on Hopper.

Tiles are transposed, `[token, query]`. Each query head's tiles overwrite the previous head's in smem.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, warpgroup_mma_wait

from tokenmix_core.kernels.gluon import barrier, mma_layout, wait_async_copies
from tokenmix_nha.ops.slot_window.hopper.gates import as_left, async_copy_tokens, mma_add_opaque, mma_opaque, rounded
from tokenmix_nha.ops.slot_window.hopper.pairs import add_window, softmax


@gluon.jit
def _mask_causal(b_x, dtype: gl.constexpr):
    """Round X, with 0 for pairs whose token enters after the slots that the query sees."""
    square: gl.constexpr = mma_layout(64, 4)
    o_i = gl.arange(0, 64, gl.SliceLayout(1, square))
    return rounded(gl.where(o_i[:, None] <= gl.arange(0, 64, gl.SliceLayout(0, square))[None, :], b_x, 0.0), dtype)


@gluon.jit
def entries_of_heads(s_k, s_q, s_v, s_do, s_p, s_dz, q, do, p, dz, o_q, length, HQ, GROUP: gl.constexpr):
    """Sum over all heads, per token and slot `[64, M]`, the chunk's part of e (README.md); the first head's tiles are
    in smem."""
    K: gl.constexpr = s_k.shape[1]
    V: gl.constexpr = s_v.shape[1]
    M: gl.constexpr = s_p.shape[1]
    b_e = gl.zeros([64, M], gl.float32, mma_layout(M, 4))
    for i_g in range(GROUP):
        b_a, b_dp = mma_opaque(s_k, s_q.permute((1, 0)), 64), mma_opaque(s_v, s_do.permute((1, 0)), 64)
        b_a, b_dp = warpgroup_mma_wait(0, deps=[b_a, b_dp])
        b_a, b_dp = as_left(_mask_causal(b_a, s_p.dtype), M), as_left(_mask_causal(b_dp, s_p.dtype), M)
        b_e = mma_add_opaque(b_a, s_dz, b_e)
        b_e = mma_add_opaque(b_dp, s_p, b_e)
        b_e, b_a, b_dp = warpgroup_mma_wait(0, deps=[b_e, b_a, b_dp])
        if i_g < GROUP - 1:
            barrier()
            async_copy_tokens(s_q, q + (i_g + 1) * K, o_q, 0, length, HQ * K, True)
            async_copy_tokens(s_do, do + (i_g + 1) * V, o_q, 0, length, HQ * V, True)
            async_copy_tokens(s_p, p + (i_g + 1) * M, o_q, 0, length, HQ * M, True)
            async_copy_tokens(s_dz, dz + (i_g + 1) * M, o_q, 0, length, HQ * M, True)
            async_copy.commit_group()
            wait_async_copies(0)
    return b_e


@gluon.jit
def add_slots_of_heads(b_dk, b_dv, b_col, s_q, s_do, s_p, s_dz, q, do, p, dz, o_q, length, HQ, GROUP: gl.constexpr):
    """Add the gradients of keys and values through the slots from all heads; the first head's tiles are in smem."""
    K: gl.constexpr = s_q.shape[1]
    V: gl.constexpr = s_do.shape[1]
    M: gl.constexpr = s_p.shape[1]
    for i_g in range(GROUP):
        b_p, b_dz = mma_opaque(b_col, s_p.permute((1, 0)), 64), mma_opaque(b_col, s_dz.permute((1, 0)), 64)
        b_p, b_dz, b_col = warpgroup_mma_wait(0, deps=[b_p, b_dz, b_col])
        b_p, b_dz = as_left(_mask_causal(b_p, s_p.dtype), V), as_left(_mask_causal(b_dz, s_p.dtype), K)
        barrier()
        if i_g < GROUP - 1:
            async_copy_tokens(s_p, p + (i_g + 1) * M, o_q, 0, length, HQ * M, True)
            async_copy_tokens(s_dz, dz + (i_g + 1) * M, o_q, 0, length, HQ * M, True)
        b_dv = mma_add_opaque(b_p, s_do, b_dv)
        b_dk = mma_add_opaque(b_dz, s_q, b_dk)
        b_dv, b_dk, b_p, b_dz = warpgroup_mma_wait(0, deps=[b_dv, b_dk, b_p, b_dz])
        if i_g < GROUP - 1:
            barrier()
            async_copy_tokens(s_q, q + (i_g + 1) * K, o_q, 0, length, HQ * K, True)
            async_copy_tokens(s_do, do + (i_g + 1) * V, o_q, 0, length, HQ * V, True)
            async_copy.commit_group()
            wait_async_copies(0)
    return b_dk, b_dv


@gluon.jit
def add_window_of_heads(
    b_dk, b_dv, s_k, s_q, s_v, s_do, s_qn, s_don, q, do, lse, delta, o_q, o_w, shift_0, shift_1, window, length, first,
    oldest, HQ, scale, GROUP: gl.constexpr,
):  # fmt: skip
    """Add the gradients of keys and values through the window from all heads, last head first. The last head's dO is in
    smem; its other tiles are in flight, the chunk's own queries in the first commit group."""
    K: gl.constexpr = s_k.shape[1]
    V: gl.constexpr = s_v.shape[1]
    square: gl.constexpr = mma_layout(64, 4)
    col: gl.constexpr = gl.SliceLayout(0, square)
    o_j = gl.arange(0, 64, col)
    # each thread holds one element until the vectors are broadcast
    o_l = o_q + gl.arange(0, 64, gl.BlockedLayout([1], [32], [4], [0]))
    m_l = (o_l >= 0) & (o_l < length)
    for i in range(GROUP):
        i_g = GROUP - 1 - i
        lse_t = gl.load(lse + i_g + o_l.to(gl.int64) * HQ, mask=m_l, other=float("inf"))
        delta_t = gl.load(delta + i_g + o_l.to(gl.int64) * HQ, mask=m_l, other=0.0)
        wait_async_copies(1)
        b_s, b_ds = mma_opaque(s_k, s_q.permute((1, 0)), 64), mma_opaque(s_v, s_do.permute((1, 0)), 64)
        b_s, b_ds = warpgroup_mma_wait(0, deps=[b_s, b_ds])
        o_i = gl.arange(0, 64, gl.SliceLayout(1, square))[:, None]
        m_w = (o_i > o_j[None, :]) & (o_i <= o_j[None, :] + window) & (first + o_i >= oldest)
        b_s, b_ds = softmax(b_s, b_ds, gl.convert_layout(lse_t, col), gl.convert_layout(delta_t, col), m_w, scale)
        b_p, b_dz = as_left(b_s.to(s_q.dtype), V), as_left(b_ds.to(s_q.dtype), K)
        b_dv = mma_add_opaque(b_p, s_do, b_dv)
        b_dk = mma_add_opaque(b_dz, s_q, b_dk)
        b_dv, b_dk, b_p, b_dz = warpgroup_mma_wait(0, deps=[b_dv, b_dk, b_p, b_dz])
        p_q, p_do = q + i_g * K, do + i_g * V
        b_dk, b_dv = add_window(
            b_dk, b_dv, s_k, s_v, s_qn, s_don, p_q, p_do, lse + i_g, delta + i_g, o_w, shift_0, shift_1, window, length,
            first, oldest, HQ, scale, K, V,
        )  # fmt: skip
        if i_g > 0:
            barrier()
            async_copy_tokens(s_q, p_q - K, o_q, 0, length, HQ * K, True)
            async_copy_tokens(s_do, p_do - V, o_q, 0, length, HQ * V, True)
            async_copy.commit_group()
            async_copy_tokens(s_qn, p_q - K, o_w + shift_0, 0, length, HQ * K, True)
            async_copy_tokens(s_don, p_do - V, o_w + shift_0, 0, length, HQ * V, True)
            async_copy.commit_group()
    return b_dk, b_dv
