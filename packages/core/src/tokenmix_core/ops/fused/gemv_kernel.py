"""Triton kernels of `fused_linears`: a program multiplies BN rows of one weight by all rows of x."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tokenmix_core.chunking import cdiv, next_power_of_2
from tokenmix_core.kernels.launch.launcher import cached_launch
from tokenmix_core.kernels.launch.pdl import PDL
from tokenmix_core.kernels.triton.activations import sigmoid
from tokenmix_core.ops.autograd import cached_op, direct_when_eager, of_fields
from tokenmix_core.ops.fused import MAX_WEIGHTS

_COUNTS = [f"n{i}" for i in range(MAX_WEIGHTS)]
# kernels need this constant, because Triton 3.6 cannot take the length of a tuple that holds None
_WEIGHTS = tl.constexpr(MAX_WEIGHTS)


class GemvTile(NamedTuple):
    """The tile of a program, BN rows of a weight read in steps of BD columns, with its launch options."""

    BN: int
    BD: int
    num_warps: int
    num_stages: int


def gemv_tile(B: int, D: int, rows: int) -> GemvTile:
    """Return the tile for x `[B, D]` and for weights `[N, D]` that have `rows` rows in total."""
    if B == 1:
        # use larger tiles for wide weights with few rows: a last wave of few programs takes as long as a full wave
        few = D >= 4096 and rows < 16_384
        return GemvTile(8, 512, 8, 1) if few else GemvTile(4, min(1024, next_power_of_2(D)), 4, 1)
    return GemvTile(16, min(256, max(16, next_power_of_2(D))), 4, 3)


@triton.jit
def find_rows(weights, outputs, counts, BN: tl.constexpr):
    """Return, for this program: its tile index within a weight, this weight, the weight's output and number of rows."""
    i_n, w, y, N = tl.program_id(0), weights[0], outputs[0], counts[0]
    for i in tl.static_range(1, _WEIGHTS):
        if weights[i] is not None:
            tiles = tl.cdiv(N, BN)
            behind = i_n >= tiles
            w, y = tl.where(behind, weights[i], w), tl.where(behind, outputs[i], y)
            N = tl.where(behind, counts[i], N)
            i_n = tl.where(behind, i_n - tiles, i_n)
    return i_n, w, y, N


@cached_launch
@triton.jit(do_not_specialize=_COUNTS)
def one_row_kernel(
    x, gate, residual, w0, w1, w2, w3, w4, w5, y0, y1, y2, y3, y4, y5, n0, n1, n2, n3, n4, n5, D,
    BN: tl.constexpr, BD: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """GEMV: compute BN elements of W x, or of W (silu(gate) · x) if there is a gate; prefetch W one iteration ahead.

    `residual`, unless None, is added to the rounded result; it requires that there is one weight.
    """
    if PDL:
        gdc_launch_dependents()
    i_n, w, y, N = find_rows((w0, w1, w2, w3, w4, w5), (y0, y1, y2, y3, y4, y5), (n0, n1, n2, n3, n4, n5), BN)
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
@triton.jit(do_not_specialize=_COUNTS)
def fused_linears_kernel(
    x, w0, w1, w2, w3, w4, w5, y0, y1, y2, y3, y4, y5, n0, n1, n2, n3, n4, n5, B, D, s_x,
    BB: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """GEMM: multiply BN rows of one weight by all B rows of x."""
    i_n, w, y, N = find_rows((w0, w1, w2, w3, w4, w5), (y0, y1, y2, y3, y4, y5), (n0, n1, n2, n3, n4, n5), BN)
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
    """Return x Wᵀ `[B, N]` for each weight W `[N, D]`; the elements of each row of x `[B, D]` are contiguous.

    If x has one row, `gate` multiplies it by silu(gate); if there is also only one weight, `residual` is added to y.
    """
    assert gate is residual is None or len(x) == 1
    assert residual is None or len(weights) == 1
    # if a weight is copied here, launch without PDL: with PDL the kernel would read the copy before it is complete
    launch_options = {} if all(w.is_contiguous() for w in weights) else {PDL: False}
    weights = [w.contiguous() for w in weights]
    (B, D), ns = x.shape, [len(w) for w in weights]
    outputs = [x.new_empty(B, N) for N in ns]
    tensors = {name: None for i in range(MAX_WEIGHTS) for name in (f"w{i}", f"y{i}")} | {
        f"{letter}{i}": t for letter, given in (("w", weights), ("y", outputs)) for i, t in enumerate(given)
    }
    sizes = {f"n{i}": N for i, N in enumerate([*ns, *[0] * (MAX_WEIGHTS - len(ns))])}
    tile = gemv_tile(B, D, sum(ns))
    grid = (sum(cdiv(N, tile.BN) for N in ns),)
    if B == 1:
        one_row_kernel[grid](
            x=x, gate=gate, residual=residual, **tensors, **sizes, D=D, BN=tile.BN, BD=tile.BD,
            num_warps=tile.num_warps, **launch_options,
        )  # fmt: skip
    else:
        fused_linears_kernel[grid](
            x=x, **tensors, **sizes, B=B, D=D, s_x=x.stride(0), BB=max(16, next_power_of_2(B)), BN=tile.BN, BD=tile.BD,
            num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip
    return outputs


class Inputs(NamedTuple):
    """Arguments of the operator: x and six weights; with fewer than six weights the last fields are None."""

    x: Tensor
    weight0: Tensor
    weight1: Tensor | None = None
    weight2: Tensor | None = None
    weight3: Tensor | None = None
    weight4: Tensor | None = None
    weight5: Tensor | None = None


def _weights(given: Inputs) -> list[Tensor]:
    return [w for w in given[1:] if w is not None]


@of_fields
def _run(given: Inputs) -> list[Tensor]:
    """Return x Wᵀ `[B, N]` for each weight W."""
    x = given.x if given.x.stride(1) == 1 else given.x.contiguous()
    return fused_linears_forward(x, _weights(given))


def _empty_outputs(given: Inputs) -> list[Tensor]:
    return [given.x.new_empty(given.x.shape[0], w.shape[0]) for w in _weights(given)]


fused_linears_op = cached_op("tokenmix_core::fused_linears", _run, _empty_outputs)
fused_linears_triton = direct_when_eager(fused_linears_op, _run)
