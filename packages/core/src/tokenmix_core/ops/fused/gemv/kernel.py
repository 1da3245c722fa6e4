"""Kernels for the rows of several weights: a program has some rows of one of them, and all rows of x."""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tokenmix_core.chunking import cdiv, next_power_of_2
from tokenmix_core.kernels import tuning
from tokenmix_core.kernels.launch.launcher import cached_launch
from tokenmix_core.kernels.launch.pdl import PDL
from tokenmix_core.ops.causal_conv1d.forward import sigmoid
from tokenmix_core.ops.fused.gemv.sizes import MOST_WEIGHTS

_NUMBERS = [f"n{i}" for i in range(MOST_WEIGHTS)]


@triton.jit
def next_weight(i_n, w, y, N, w_next, y_next, n_next, BN: tl.constexpr):
    """The next weight, its result and rows in place of the last, if tile `i_n` lies behind that; the tile's number."""
    if w_next is not None:
        tiles = tl.cdiv(N, BN)
        behind = i_n >= tiles
        w, y, N = tl.where(behind, w_next, w), tl.where(behind, y_next, y), tl.where(behind, n_next, N)
        i_n = tl.where(behind, i_n - tiles, i_n)
    return i_n, w, y, N


@triton.jit
def find_rows(
    w0, w1, w2, w3, w4, w5, y0, y1, y2, y3, y4, y5, n0, n1, n2, n3, n4, n5, BN: tl.constexpr
):  # fmt: skip
    """This program's tile, its weight, result and number of rows."""
    i_n, w, y, N = next_weight(tl.program_id(0), w0, y0, n0, w1, y1, n1, BN)
    i_n, w, y, N = next_weight(i_n, w, y, N, w2, y2, n2, BN)
    i_n, w, y, N = next_weight(i_n, w, y, N, w3, y3, n3, BN)
    i_n, w, y, N = next_weight(i_n, w, y, N, w4, y4, n4, BN)
    return next_weight(i_n, w, y, N, w5, y5, n5, BN)


@cached_launch
@triton.jit(do_not_specialize=_NUMBERS)
def one_row_kernel(
    x, gate, residual, w0, w1, w2, w3, w4, w5, y0, y1, y2, y3, y4, y5, n0, n1, n2, n3, n4, n5, D,
    BN: tl.constexpr, BD: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """BN numbers of a product with one row: silu(gate) · x, or x; weights are asked for a tile ahead.

    A residual is added to the rounded product, of one weight alone.
    """
    if PDL:
        gdc_launch_dependents()
    i_n, w, y, N = find_rows(w0, w1, w2, w3, w4, w5, y0, y1, y2, y3, y4, y5, n0, n1, n2, n3, n4, n5, BN)
    o_n, o_d = i_n * BN + tl.arange(0, BN), tl.arange(0, BD)
    m_n = (o_n < N)[:, None]
    p_w = w + o_n.to(tl.int64)[:, None] * D + o_d[None, :]
    b_w = tl.load(p_w, mask=m_n & (o_d < D)[None, :], other=0.0)
    if PDL:
        gdc_wait()
    b_y = tl.zeros([BN, BD], tl.float32)
    for i in range(0, D, BD):
        b_x = tl.load(x + i + o_d, mask=i + o_d < D, other=0.0)
        if gate is not None:
            b_a = tl.load(gate + i + o_d, mask=i + o_d < D, other=0.0).to(tl.float32)
            b_x = (b_a * sigmoid(b_a) * b_x.to(tl.float32)).to(x.dtype.element_ty)
        b_next = tl.load(p_w + i + BD, mask=m_n & (i + BD + o_d < D)[None, :], other=0.0)
        b_y += b_w.to(tl.float32) * b_x.to(tl.float32)[None, :]
        b_w = b_next
    b_sum = tl.sum(b_y, 1).to(y.dtype.element_ty)
    if residual is not None:
        b_r = tl.load(residual + o_n, mask=o_n < N, other=0.0)
        b_sum = (b_r.to(tl.float32) + b_sum.to(tl.float32)).to(y.dtype.element_ty)
    tl.store(y + o_n, b_sum, mask=o_n < N)


@cached_launch
@triton.jit(do_not_specialize=_NUMBERS)
def fused_linears_kernel(
    x, w0, w1, w2, w3, w4, w5, y0, y1, y2, y3, y4, y5, n0, n1, n2, n3, n4, n5, B, D, s_x,
    BB: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """A tile of rows of one of the weights a program, of products with several rows."""
    i_n, w, y, N = find_rows(w0, w1, w2, w3, w4, w5, y0, y1, y2, y3, y4, y5, n0, n1, n2, n3, n4, n5, BN)
    o_n = i_n * BN + tl.arange(0, BN)
    o_b = tl.arange(0, BB)
    m_n, m_b = o_n < N, o_b < B
    b_y = tl.zeros([BN, BB], tl.float32)
    for i in range(0, D, BD):
        o_d = i + tl.arange(0, BD)
        p_w = w + o_n.to(tl.int64)[:, None] * D + o_d[None, :]
        b_w = tl.load(p_w, mask=m_n[:, None] & (o_d < D)[None, :], other=0.0)
        p_x = x + o_b[None, :] * s_x + o_d[:, None]
        b_x = tl.load(p_x, mask=m_b[None, :] & (o_d < D)[:, None], other=0.0)
        b_y = tl.dot(b_w, b_x, b_y)
    tl.store(y + o_b[None, :] * N + o_n[:, None], b_y.to(y.dtype.element_ty), mask=m_n[:, None] & m_b[None, :])


def fused_linears_forward(
    x: Tensor, weights: Sequence[Tensor], gate: Tensor | None = None, residual: Tensor | None = None
) -> list[Tensor]:
    """`[B, N]` of each weight, for x `[B, D]` with columns side by side.

    Of one row there may be a `gate`, for silu(gate) · x, and of one row and weight a `residual` that is added.
    """
    assert gate is residual is None or len(x) == 1
    assert residual is None or len(weights) == 1
    # a weight that is copied here must not be read before the copy has ended
    early = {} if all(w.is_contiguous() for w in weights) else {PDL: False}
    weights = [w.contiguous() for w in weights]
    (B, D), ns = x.shape, [len(w) for w in weights]
    outputs = [x.new_empty(B, N) for N in ns]
    tensors = {name: None for i in range(MOST_WEIGHTS) for name in (f"w{i}", f"y{i}")} | {
        f"{letter}{i}": t for letter, given in (("w", weights), ("y", outputs)) for i, t in enumerate(given)
    }
    sizes = {f"n{i}": N for i, N in enumerate([*ns, *[0] * (MOST_WEIGHTS - len(ns))])}
    tile = tuning.fused_linears(B, D, sum(ns))
    grid = (sum(cdiv(N, tile.BN) for N in ns),)
    if B == 1:
        one_row_kernel[grid](
            x=x, gate=gate, residual=residual, **tensors, **sizes, D=D, BN=tile.BN, BD=tile.BD,
            num_warps=tile.num_warps, **early,
        )  # fmt: skip
    else:
        fused_linears_kernel[grid](
            x=x, **tensors, **sizes, B=B, D=D, s_x=x.stride(0), BB=max(16, next_power_of_2(B)), BN=tile.BN, BD=tile.BD,
            num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip
    return outputs
