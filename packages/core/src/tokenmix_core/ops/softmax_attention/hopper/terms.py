"""Terms of queries, for Gluon: where the kernels of queries leave them, and what adds them to products."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tokenmix_core.ops.softmax_attention import terms
from tokenmix_core.ops.softmax_attention.terms import terms_of
from tokenmix_core.tile.hopper import row_layout

EACH, TERMS = gl.constexpr(terms.EACH.value), gl.constexpr(terms.TERMS.value)


@gluon.jit
def store_terms(p_terms, b_lse, b_delta, rows, scale):
    """Store the terms of the queries of a tile that exist."""
    layout: gl.constexpr = row_layout(TERMS, gl.num_warps())
    row: gl.constexpr = gl.SliceLayout(1, layout)
    o_t = gl.arange(0, b_lse.shape[0], row)[:, None]
    o_c = gl.arange(0, TERMS, gl.SliceLayout(0, layout))[None, :]
    b_terms = terms_of(
        o_c, gl.convert_layout(b_lse, row)[:, None], gl.convert_layout(b_delta, row)[:, None], scale
    )  # fmt: skip
    gl.store(p_terms + o_t * TERMS + o_c, b_terms, mask=o_t < rows)


@gluon.jit
def adding_terms(first: gl.constexpr, rows: gl.constexpr):
    """A shared tile of ones and zeros, whose product with terms is the sum of those from `first` on."""
    layout: gl.constexpr = row_layout(TERMS, gl.num_warps())
    ones_s = allocate_terms(rows)
    o_c = gl.arange(0, TERMS, gl.SliceLayout(0, layout))[None, :] + gl.zeros([rows, TERMS], gl.int32, layout)
    ones_s.store(gl.where((o_c >= first) & (o_c < first + EACH), 1.0, 0.0).to(gl.bfloat16))
    return ones_s


@gluon.jit
def allocate_terms(rows: gl.constexpr):
    """Shared memory for the terms of a tile."""
    return gl.allocate_shared_memory(gl.bfloat16, [rows, TERMS], gl.NVMMASharedLayout(32, 16, 2))
