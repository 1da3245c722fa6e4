"""One kernel for the rows of several weights: a program has some rows of one of them, and all rows of x."""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from tokenmix_core.chunking import cdiv, next_power_of_2
from tokenmix_core.launch.kernels import cached_launch
from tokenmix_core.ops.projections.sizes import MOST_WEIGHTS

# rows of weights that a program takes, and columns that it reads at a time
TILE_ROWS, TILE_COLUMNS = 16, 256


@triton.jit
def take_rows(x, w, y, i_n, N, B, D, s_x, BB: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr):
    """y of tile `i_n` of a weight's N rows, if it has such a tile; then the program's number behind this weight."""
    tiles = 0
    if w is not None:
        tiles = tl.cdiv(N, BN)
        if (i_n >= 0) & (i_n < tiles):
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
    return i_n - tiles


@cached_launch
@triton.jit
def linears_kernel(
    x, w0, w1, w2, w3, w4, w5, y0, y1, y2, y3, y4, y5, n0, n1, n2, n3, n4, n5, B, D, s_x,
    BB: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """A tile of rows of one of the weights a program."""
    i_n = take_rows(x, w0, y0, tl.program_id(0), n0, B, D, s_x, BB, BN, BD)
    i_n = take_rows(x, w1, y1, i_n, n1, B, D, s_x, BB, BN, BD)
    i_n = take_rows(x, w2, y2, i_n, n2, B, D, s_x, BB, BN, BD)
    i_n = take_rows(x, w3, y3, i_n, n3, B, D, s_x, BB, BN, BD)
    i_n = take_rows(x, w4, y4, i_n, n4, B, D, s_x, BB, BN, BD)
    take_rows(x, w5, y5, i_n, n5, B, D, s_x, BB, BN, BD)


def linears_forward(x: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    """`[B, N]` of each weight, for x `[B, D]` with columns side by side."""
    (B, D), ns = x.shape, [len(w) for w in weights]
    outputs = [x.new_empty(B, N) for N in ns]
    tensors = {name: None for i in range(MOST_WEIGHTS) for name in (f"w{i}", f"y{i}")} | {
        f"{letter}{i}": t for letter, given in (("w", weights), ("y", outputs)) for i, t in enumerate(given)
    }
    sizes = {f"n{i}": N for i, N in enumerate([*ns, *[0] * (MOST_WEIGHTS - len(ns))])}
    linears_kernel[(sum(cdiv(N, TILE_ROWS) for N in ns),)](
        x=x, **tensors, **sizes, B=B, D=D, s_x=x.stride(0), BB=max(16, next_power_of_2(B)), BN=TILE_ROWS,
        BD=min(TILE_COLUMNS, max(16, next_power_of_2(D))), num_warps=4, num_stages=3,
    )  # fmt: skip
    return outputs
