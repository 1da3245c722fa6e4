"""Gradients of the tokens of a weak chunk (`tile.py`) from all query heads of a GQA group on Hopper, head by head.

Tiles are transposed, `[token, query]`. In smem, the tiles of each query head overwrite those of the previous head.
"""

from collections import namedtuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, warpgroup_mma_wait

from tokenmix_core.kernels.gluon import barrier, mma_layout, wait_async_copies
from tokenmix_nha.ops.slot_window.hopper.gates import as_left, async_copy_tokens, mma_add_opaque, mma_opaque, rounded
from tokenmix_nha.ops.slot_window.hopper.pairs import WindowPointers, add_window, softmax

# tiles of one query head in smem, or pointers to its rows of a sequence
QueryTiles = namedtuple("QueryTiles", "q do p dz")


@gluon.jit
def _mask_causal(b_x, dtype: gl.constexpr):
    """Return x rounded to `dtype`, with 0 for pairs whose token is not yet in the slots that the query reads."""
    square: gl.constexpr = mma_layout(64, 4)
    o_i = gl.arange(0, 64, gl.SliceLayout(1, square))
    return rounded(gl.where(o_i[:, None] <= gl.arange(0, 64, gl.SliceLayout(0, square))[None, :], b_x, 0.0), dtype)


@gluon.jit
def entries_of_heads(s_k, s_v, s, t, o_q, length, HQ, GROUP: gl.constexpr):
    """Return the chunk's part of e (README.md) per token and slot, `[64, M]`, summed over the group's query heads; the
    first head's tiles are in smem."""
    K: gl.constexpr = s_k.shape[1]
    V: gl.constexpr = s_v.shape[1]
    M: gl.constexpr = s.p.shape[1]
    b_e = gl.zeros([64, M], gl.float32, mma_layout(M, 4))
    for i_g in range(GROUP):
        b_a, b_dp = mma_opaque(s_k, s.q.permute((1, 0)), 64), mma_opaque(s_v, s.do.permute((1, 0)), 64)
        b_a, b_dp = warpgroup_mma_wait(0, deps=[b_a, b_dp])
        b_a, b_dp = as_left(_mask_causal(b_a, s.p.dtype), M), as_left(_mask_causal(b_dp, s.p.dtype), M)
        b_e = mma_add_opaque(b_a, s.dz, b_e)
        b_e = mma_add_opaque(b_dp, s.p, b_e)
        b_e, b_a, b_dp = warpgroup_mma_wait(0, deps=[b_e, b_a, b_dp])
        if i_g < GROUP - 1:
            barrier()
            async_copy_tokens(s.q, t.q + (i_g + 1) * K, o_q, 0, length, HQ * K, True)
            async_copy_tokens(s.do, t.do + (i_g + 1) * V, o_q, 0, length, HQ * V, True)
            async_copy_tokens(s.p, t.p + (i_g + 1) * M, o_q, 0, length, HQ * M, True)
            async_copy_tokens(s.dz, t.dz + (i_g + 1) * M, o_q, 0, length, HQ * M, True)
            async_copy.commit_group()
            wait_async_copies(0)
    return b_e


@gluon.jit
def add_slots_of_heads(b_dk, b_dv, b_col, s, t, o_q, length, HQ, GROUP: gl.constexpr):
    """Add to b_dk and b_dv the gradients through the slots, of all heads; the tiles of the first head are in smem."""
    K: gl.constexpr = s.q.shape[1]
    V: gl.constexpr = s.do.shape[1]
    M: gl.constexpr = s.p.shape[1]
    for i_g in range(GROUP):
        b_p, b_dz = mma_opaque(b_col, s.p.permute((1, 0)), 64), mma_opaque(b_col, s.dz.permute((1, 0)), 64)
        b_p, b_dz, b_col = warpgroup_mma_wait(0, deps=[b_p, b_dz, b_col])
        b_p, b_dz = as_left(_mask_causal(b_p, s.p.dtype), V), as_left(_mask_causal(b_dz, s.p.dtype), K)
        barrier()
        if i_g < GROUP - 1:
            async_copy_tokens(s.p, t.p + (i_g + 1) * M, o_q, 0, length, HQ * M, True)
            async_copy_tokens(s.dz, t.dz + (i_g + 1) * M, o_q, 0, length, HQ * M, True)
        b_dv = mma_add_opaque(b_p, s.do, b_dv)
        b_dk = mma_add_opaque(b_dz, s.q, b_dk)
        b_dv, b_dk, b_p, b_dz = warpgroup_mma_wait(0, deps=[b_dv, b_dk, b_p, b_dz])
        if i_g < GROUP - 1:
            barrier()
            async_copy_tokens(s.q, t.q + (i_g + 1) * K, o_q, 0, length, HQ * K, True)
            async_copy_tokens(s.do, t.do + (i_g + 1) * V, o_q, 0, length, HQ * V, True)
            async_copy.commit_group()
            wait_async_copies(0)
    return b_dk, b_dv


@gluon.jit
def add_window_of_heads(b_dk, b_dv, s_q, s_do, s, p, w, o_q, GROUP: gl.constexpr):
    """Add to b_dk and b_dv the gradients through the window from all heads, last head first. The last head's dO is in
    smem. Two commit groups of async copies are in flight: the last head's queries, then its first window tile `s`."""
    K: gl.constexpr = s.k.shape[1]
    V: gl.constexpr = s.v.shape[1]
    square: gl.constexpr = mma_layout(64, 4)
    col: gl.constexpr = gl.SliceLayout(0, square)
    o_j = gl.arange(0, 64, col)
    # a thread holds one element until the vectors are broadcast: this saves registers
    o_l = o_q + gl.arange(0, 64, gl.BlockedLayout([1], [32], [4], [0]))
    m_l = (o_l >= 0) & (o_l < w.length)
    for i in range(GROUP):
        i_g = GROUP - 1 - i
        lse_t = gl.load(p.lse + i_g + o_l.to(gl.int64) * w.HQ, mask=m_l, other=float("inf"))
        delta_t = gl.load(p.delta + i_g + o_l.to(gl.int64) * w.HQ, mask=m_l, other=0.0)
        wait_async_copies(1)
        b_s, b_ds = mma_opaque(s.k, s_q.permute((1, 0)), 64), mma_opaque(s.v, s_do.permute((1, 0)), 64)
        b_s, b_ds = warpgroup_mma_wait(0, deps=[b_s, b_ds])
        o_i = gl.arange(0, 64, gl.SliceLayout(1, square))[:, None]
        m_w = (o_i > o_j[None, :]) & (o_i <= o_j[None, :] + w.window) & (w.first + o_i >= w.oldest)
        b_s, b_ds = softmax(b_s, b_ds, gl.convert_layout(lse_t, col), gl.convert_layout(delta_t, col), m_w, w.scale)
        b_p, b_dz = as_left(b_s.to(s_q.dtype), V), as_left(b_ds.to(s_q.dtype), K)
        b_dv = mma_add_opaque(b_p, s_do, b_dv)
        b_dk = mma_add_opaque(b_dz, s_q, b_dk)
        b_dv, b_dk, b_p, b_dz = warpgroup_mma_wait(0, deps=[b_dv, b_dk, b_p, b_dz])
        p_q, p_do = p.q + i_g * K, p.do + i_g * V
        b_dk, b_dv = add_window(b_dk, b_dv, s, WindowPointers(p_q, p_do, p.lse + i_g, p.delta + i_g), w)
        if i_g > 0:
            barrier()
            async_copy_tokens(s_q, p_q - K, o_q, 0, w.length, w.HQ * K, True)
            async_copy_tokens(s_do, p_do - V, o_q, 0, w.length, w.HQ * V, True)
            async_copy.commit_group()
            async_copy_tokens(s.q, p_q - K, w.o_w + w.shift_0, 0, w.length, w.HQ * K, True)
            async_copy_tokens(s.do, p_do - V, w.o_w + w.shift_0, 0, w.length, w.HQ * V, True)
            async_copy.commit_group()
    return b_dk, b_dv
