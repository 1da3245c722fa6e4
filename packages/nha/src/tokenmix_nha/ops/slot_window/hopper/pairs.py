"""Gradients of keys and values through the window on Hopper. Tiles are transposed, `[token, query]`."""

from collections import namedtuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, warpgroup_mma_wait

from tokenmix_core.kernels.gluon import LOG2_E, barrier, mma_layout, wait_async_copies
from tokenmix_nha.ops.slot_window.hopper.gates import as_left, async_copy_tokens, mma_add_opaque, mma_opaque

# tiles in smem: k and v of a chunk; q and do of BN queries whose windows reach tokens of the chunk
WindowTiles = namedtuple("WindowTiles", "k v q do")
# pointers to a query head's rows of a sequence
WindowPointers = namedtuple("WindowPointers", "q do lse delta")
# the queries that see a chunk's tokens in their window: from `o_w` + `shift_0` to `o_w` + `shift_1`
QueryWindow = namedtuple("QueryWindow", "o_w shift_0 shift_1 window length first oldest HQ scale")


@gluon.jit
def load_vectors(end, lse, delta, entry, begin_q, o_q, length, slots, HQ, M: gl.constexpr):
    """Load a chunk's decay per slot, and lse and δ of the 64 queries `o_q`; missing queries get lse = ∞ and so
    probability 0. Each thread holds one element until the vectors are broadcast, which saves registers."""
    line: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    o_l, o_m = gl.arange(0, 64, line), gl.arange(0, M, line)
    o_row = begin_q + (o_q + o_l).to(gl.int64) * HQ
    m_row = (o_q + o_l >= 0) & (o_q + o_l < length)
    end_m = gl.exp2(gl.load(end + entry * M + o_m, mask=o_m < slots, other=0.0))
    lse_t = gl.load(lse + o_row, mask=m_row, other=float("inf"))
    return end_m, lse_t, gl.load(delta + o_row, mask=m_row, other=0.0)


@gluon.jit
def softmax(b_s, b_ds, b_lse, b_delta, m_s, scale):
    """Return probabilities and logit gradients from k · q and v · do of pairs `[token, query]` in the window."""
    b_s = gl.exp2(gl.where(m_s, b_s * (scale * LOG2_E) - b_lse[None, :], float("-inf")))
    return b_s, b_s * (b_ds - b_delta[None, :]) * scale


@gluon.jit
def add_window(b_dk, b_dv, s, p, w):
    """Add the gradients from the window's queries, BN per iteration; the caller has started to copy the first BN.

    `s` is a `WindowTiles`, `p` a `WindowPointers` and `w` a `QueryWindow`.
    """
    BN: gl.constexpr = s.q.shape[0]
    K: gl.constexpr = s.k.shape[1]
    V: gl.constexpr = s.v.shape[1]
    layout: gl.constexpr = mma_layout(BN, 4)
    o_i, o_n = gl.arange(0, 64, gl.SliceLayout(1, layout))[:, None], gl.arange(0, BN, gl.SliceLayout(0, layout))
    dtype: gl.constexpr = s.q.dtype
    for shift in range(w.shift_0, w.shift_1, BN):
        o_q = w.o_w + shift + o_n
        m_q = (o_q >= 0) & (o_q < w.length) & (shift + o_n < w.shift_1)
        b_lse = gl.load(p.lse + o_q.to(gl.int64) * w.HQ, mask=m_q, other=float("inf"))
        b_delta = gl.load(p.delta + o_q.to(gl.int64) * w.HQ, mask=m_q, other=0.0)
        wait_async_copies(0)
        b_s, b_ds = mma_opaque(s.k, s.q.permute((1, 0)), BN), mma_opaque(s.v, s.do.permute((1, 0)), BN)
        b_s, b_ds = warpgroup_mma_wait(0, deps=[b_s, b_ds])
        o_s = (shift + o_n)[None, :] - o_i
        m_s = (o_s >= 0) & (o_s < w.window) & (w.first + o_i >= w.oldest)
        b_s, b_ds = softmax(b_s, b_ds, b_lse, b_delta, m_s, w.scale)
        b_ds, b_p = as_left(b_ds.to(dtype), K), as_left(b_s.to(dtype), V)
        b_dv = mma_add_opaque(b_p, s.do, b_dv)
        b_dk = mma_add_opaque(b_ds, s.q, b_dk)
        b_dv, b_dk, b_p, b_ds = warpgroup_mma_wait(0, deps=[b_dv, b_dk, b_p, b_ds])
        if shift + BN < w.shift_1:
            barrier()
            async_copy_tokens(s.q, p.q, w.o_w + shift + BN, 0, w.length, w.HQ * K)
            async_copy_tokens(s.do, p.do, w.o_w + shift + BN, 0, w.length, w.HQ * V)
            async_copy.commit_group()
    return b_dk, b_dv
