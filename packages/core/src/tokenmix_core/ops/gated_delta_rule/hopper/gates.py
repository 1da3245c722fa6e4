"""Load the gates that `prepare` computed, and store vectors made from them in shared memory."""

from collections import namedtuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tokenmix_core.kernels.gluon.hopper import causal_decay, row_layout


@gluon.jit
def load_last(p_gates, rows):
    """Load b, the log2 of the cumulative decay, of a chunk's last token; `rows` tokens are left in the sequence."""
    return gl.load(p_gates + (gl.maximum(gl.minimum(rows, 64), 1) - 1) * 4)


@gluon.jit
def load_gate(p_gate, rows, layout: gl.constexpr):
    """Load one of the four gates of a chunk's tokens; rows past the sequence's end repeat the last token's gate."""
    return gl.load(p_gate + gl.minimum(gl.arange(0, 64, layout), rows - 1) * 4)


@gluon.jit
def load_gates(p_gates, token, length, layout: gl.constexpr):
    """Return b, β r and r of the chunk at `token`, and its last b; rows past the end repeat the sequence's last token.

    b: cumulative log2 decays; r: the keys' inverse norms. `token` is clamped to the sequence.
    """
    token = gl.maximum(gl.minimum(token, length - 1), 0)
    p_gates += token.to(gl.int64) * 4
    rows = gl.maximum(gl.minimum(length - token, 64), 1)
    b_b, b_w = load_gate(p_gates, rows, layout), load_gate(p_gates + 1, rows, layout)
    return b_b, b_w, load_gate(p_gates + 2, rows, layout), gl.load(p_gates + (rows - 1) * 4)


@gluon.jit
def write_factor(writes, slot, i_hv, HV):
    """Load the write factor of the chunk with index `slot` in the batch; return 1 if `writes` is None."""
    if writes is None:
        return 1.0
    else:
        return gl.load(writes + slot.to(gl.int64) * HV + i_hv)


# vectors of a chunk, kept in shared memory because each reader needs another register layout. b: cumulative decays; p:
# β r (r: inverse key norms), later the factor of dO; w: the factor of residuals in the next state, 2^(b_last − b) β r;
# y: −γ r, with γ = 2^b; q: the scale times q's inverse norms
GateVectors = namedtuple("GateVectors", "b p w y q")


@gluon.jit
def gate_vectors(s_gates):
    """Return the five rows of `s_gates` as `GateVectors`."""
    return GateVectors(s_gates.index(0), s_gates.index(1), s_gates.index(2), s_gates.index(3), s_gates.index(4))


@gluon.jit
def store_gate_vectors(g, b_b, b_w, b_r, last, RANGE: gl.constexpr = 1.0, factor=1.0):
    """Store the `GateVectors` b, p, w and y in g; w includes the chunk's write `factor`, y the `range_factor` RANGE.

    `b_w` is β r, with r (`b_r`) the keys' inverse norms; `last` is b at the chunk's end.
    """
    g.b.store(b_b)
    g.p.store(b_w)
    g.w.store(b_w * gl.exp2(last - b_b) * factor)
    g.y.store(-gl.exp2(b_b) * b_r * RANGE)


@gluon.jit
def score_factors(
    s_q, g, scale, o_i, o_j, row: gl.constexpr, col: gl.constexpr, L2NORM: gl.constexpr, WARPS: gl.constexpr
):  # fmt: skip
    """Return F, b and n: F combines decays, β r and n, so that the scores are P' = F ⊙ Q Kᵀ.

    b are cumulative decays. n is the scale; with L2NORM it is divided by the norms of Q's rows. b and n have one
    element per row of a tile.
    """
    if L2NORM:
        b_q = s_q.load(row_layout(s_q.shape[1], WARPS)).to(gl.float32)
        g.q.store(gl.rsqrt(gl.sum(b_q * b_q, 1) + 1e-6) * scale)
        n_i = g.q.load(row)
    else:
        n_i = gl.full([s_q.shape[0]], scale, gl.float32, row)
    b_i = g.b.load(row)
    return causal_decay(b_i, g.b.load(col), o_i, o_j) * g.p.load(col)[None, :] * n_i[:, None], b_i, n_i


@gluon.constexpr_function
def range_factor(dtype, K, normalised=True):
    """Return K for float16 and normalised keys, to keep operands with inverse norms from underflow; else return 1."""
    return float(K) if normalised and dtype != gl.bfloat16 else 1.0
