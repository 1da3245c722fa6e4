"""SSD's gradients through pairs of tokens of one chunk, computed from Q Kᵀ and dO Vᵀ; README.md defines P, dP and M."""

from collections import namedtuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tokenmix_core.kernels.gluon.hopper import causal_decay, mma_layout_split_n
from tokenmix_core.ops.ssd.hopper.smem_vectors import store_row_sums

# vectors in shared memory: row sums, column sums and diagonal of M = P ⊙ dO Vᵀ (P: scores), and the diagonal of dO Vᵀ
PathSums = namedtuple("PathSums", "row column own skip")


@gluon.jit
def intra_chunk_gradients(b_qk, b_dp, s_b, s_dt, b_skip, sums, r, scale):
    """Return P diag(Δ), with the skip weight added on its diagonal, and dP; store the `PathSums` of head r.

    `b_qk` is Q Kᵀ, `b_dp` is dO Vᵀ; `s_b` holds the cumulative log2 decays, `s_dt` Δ or None. Column sums and the
    diagonal are taken before the factor Δ, row sums after it. The diagonal is not part of row and column sums, because
    no decay lies between a token and itself.
    """
    BT: gl.constexpr = b_qk.shape[0]
    square: gl.constexpr = mma_layout_split_n(BT, gl.num_warps())
    row: gl.constexpr = gl.SliceLayout(1, square)
    col: gl.constexpr = gl.SliceLayout(0, square)
    o_i, o_j = gl.arange(0, BT, row), gl.arange(0, BT, col)
    own = o_i[:, None] == o_j[None, :]
    b_gamma = causal_decay(s_b.load(row), s_b.load(col), o_i, o_j) * scale
    if b_skip is not None:
        store_row_sums(sums.skip, r, gl.where(own, b_dp, 0.0))
    b_qk *= b_gamma
    b_m = b_qk * b_dp
    b_dp *= b_gamma
    if s_dt is not None:
        store_row_sums(sums.own, r, gl.where(own, b_m, 0.0))
    b_m = gl.where(o_i[:, None] > o_j[None, :], b_m, 0.0)
    sums.column.index(r).store(gl.sum(b_m.reshape([4, BT // 4, BT]), 1))
    if s_dt is not None:
        dt_j = s_dt.load(col)[None, :]
        b_qk, b_dp, b_m = b_qk * dt_j, b_dp * dt_j, b_m * dt_j
    store_row_sums(sums.row, r, b_m)
    if b_skip is not None:
        b_qk = gl.where(own, b_qk + b_skip, b_qk)
    return b_qk, b_dp
