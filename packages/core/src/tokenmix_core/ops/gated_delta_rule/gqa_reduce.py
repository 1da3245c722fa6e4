"""Sum the gradients of q and k over the value heads that share a q/k head."""

import triton
import triton.language as tl
from torch import Tensor

from tokenmix_core.chunking import cdiv, next_power_of_2
from tokenmix_core.kernels.launch.launcher import cached_launch

# number of output rows that a program computes
_ROWS = 8


@triton.jit
def sum_rows(x, y, o_r, rows, G: tl.constexpr, K: tl.constexpr, BK: tl.constexpr):
    """Sum the rows `o_r` of x `[rows, G, K]` over G, and store the sums in y `[rows, K]`."""
    o_k = tl.arange(0, BK)[None, :]
    m_r = (o_r < rows)[:, None] & (o_k < K)
    p_x, p_y = x + (o_r * (G * K))[:, None] + o_k, y + (o_r * K)[:, None] + o_k
    b_y = tl.load(p_x, mask=m_r, other=0.0).to(tl.float32)
    for i in tl.static_range(1, G):
        b_y += tl.load(p_x + i * K, mask=m_r, other=0.0).to(tl.float32)
    tl.store(p_y, b_y.to(y.dtype.element_ty), mask=m_r)


@cached_launch
@triton.jit(do_not_specialize=["rows"])
def sum_groups_kernel(
    dq, dk, dq_sum, dk_sum, rows, G: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr
):  # fmt: skip
    """Sum BR rows of dq and of dk over the G value heads of a q/k head."""
    o_r = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    sum_rows(dq, dq_sum, o_r, rows, G, K, BK)
    sum_rows(dk, dk_sum, o_r, rows, G, K, BK)


def sum_groups(dq: Tensor, dk: Tensor, H: int) -> tuple[Tensor, Tensor]:
    """Return dq and dk `[B, T, H, K]`, summed over the value heads of the given dq and dk `[B, T, HV, K]`."""
    B, T, HV, K = dq.shape
    if HV == H:
        return dq, dk
    # a separate kernel computes the sums, because atomic additions would add in a random order
    dq_sum, dk_sum, rows = dq.new_empty(B, T, H, K), dk.new_empty(B, T, H, K), B * T * H
    sum_groups_kernel[(cdiv(rows, _ROWS),)](
        dq=dq, dk=dk, dq_sum=dq_sum, dk_sum=dk_sum, rows=rows, G=HV // H, K=K, BK=next_power_of_2(K), BR=_ROWS,
        num_warps=4,
    )  # fmt: skip
    return dq_sum, dk_sum
