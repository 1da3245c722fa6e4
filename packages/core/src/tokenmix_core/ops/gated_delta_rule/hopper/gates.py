"""How the steps load what `prepare` has made of the gates."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tokenmix_core.kernels.gluon.hopper import causal_decay, row_layout


@gluon.jit
def load_gate(p_gate, rows, layout: gl.constexpr):
    """One of a chunk's four gates; past the end its last value, where all rows that it scales are zero."""
    return gl.load(p_gate + gl.minimum(gl.arange(0, 64, layout), rows - 1) * 4)


@gluon.jit
def load_gates(p_gates, token, length, layout: gl.constexpr):
    """b, β r and r of the chunk at `token` and its last b; of the first or last chunk where there is none."""
    token = gl.maximum(gl.minimum(token, length - 1), 0)
    p_gates += token.to(gl.int64) * 4
    rows = gl.maximum(gl.minimum(length - token, 64), 1)
    b_b, b_w = load_gate(p_gates, rows, layout), load_gate(p_gates + 1, rows, layout)
    return b_b, b_w, load_gate(p_gates + 2, rows, layout), gl.load(p_gates + (rows - 1) * 4)


@gluon.jit
def share_of(writes, slot, i_hv, HV):
    """The share of its writes to the state that the chunk in a slot does not withhold: all without `writes`."""
    if writes is None:
        return 1.0
    else:
        return gl.load(writes + slot.to(gl.int64) * HV + i_hv)


@gluon.jit
def share_gates(g_b, g_p, g_w, g_y, b_b, b_w, b_r, last, ROOM: gl.constexpr = 1.0, share=1.0):
    """Store b, β r, 2^(b_last − b) β r and −γ r, with `room`, in shared memory: every layout is read from there.

    The third, by which a chunk writes to the state, is that of the `share` that it does not withhold.
    """
    g_b.store(b_b)
    g_p.store(b_w)
    g_w.store(b_w * gl.exp2(last - b_b) * share)
    g_y.store(-gl.exp2(b_b) * b_r * ROOM)


@gluon.jit
def factors_of_scores(
    s_q, g_b, g_p, g_q, scale, o_i, o_j, row: gl.constexpr, col: gl.constexpr, L2NORM: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """The factors that make P' = tril(Q Kᵀ ⊙ Γ) diag(β) of Q Kᵀ, with the norms of both; b and n by row.

    n is the scale over the norms of Q, if they are wanted.
    """
    if L2NORM:
        b_q = s_q.load(row_layout(s_q.shape[1], WARPS)).to(gl.float32)
        g_q.store(gl.rsqrt(gl.sum(b_q * b_q, 1) + 1e-6) * scale)
        n_i = g_q.load(row)
    else:
        n_i = gl.full([s_q.shape[0]], scale, gl.float32, row)
    b_i = g_b.load(row)
    return causal_decay(b_i, g_b.load(col), o_i, o_j) * g_p.load(col)[None, :] * n_i[:, None], b_i, n_i


@gluon.constexpr_function
def room(dtype, K, normalised=True):
    """A factor for operands that have norms of q and k in them, some 1 / K: else float16 would keep few digits."""
    return float(K) if normalised and dtype != gl.bfloat16 else 1.0
