"""Add logits of 0 with value 0 to a softmax that is already computed, in one pass over its outputs (`prefix.py`)."""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmix_core.chunking import cdiv
from tokenmix_core.kernels import LOG2_E, cached_launch


def add_zeros(o: Tensor, lse: Tensor, slots: int) -> Tensor:
    """Rescale and overwrite o `[B, T, H, V]` for `slots` more logits of 0 with value 0; return the new log-sum-exp."""
    batch, tokens, heads, V = o.shape
    total = torch.empty_like(lse)
    BT = 64
    grid = (cdiv(tokens, BT) * batch * heads,)
    _zeros_kernel[grid](
        o=o, lse=lse, total=total, log_slots=math.log(slots), T=tokens, H=heads, V=V, BT=BT, num_warps=4
    )
    return total


@cached_launch
@triton.jit
def _zeros_kernel(o, lse, total, log_slots, T, H, V: tl.constexpr, BT: tl.constexpr):
    """Update BT rows of one head: store `total = log(exp(lse) + slots)`, both `[B, H, T]`, and rescale o."""
    # process the last rows first: they were written last and may still be in the L2 cache
    i = tl.num_programs(0) - 1 - tl.program_id(0)
    chunks = tl.cdiv(T, BT)
    i_h, i_t, i_b = i % H, i // H % chunks, i // (H * chunks)
    o_t, o_v = i_t * BT + tl.arange(0, BT), tl.arange(0, V)
    m_t = o_t < T
    row = (i_b.to(tl.int64) * H + i_h) * T
    b_lse = tl.load(lse + row + o_t, mask=m_t, other=0.0)
    b_more = tl.log(1.0 + tl.exp2(tl.abs(b_lse - log_slots) * (-LOG2_E)))
    b_total = tl.maximum(b_lse, log_slots) + b_more
    tl.store(total + row + o_t, b_total, mask=m_t)
    p_o = o + ((i_b.to(tl.int64) * T + o_t) * H + i_h)[:, None] * V + o_v[None, :]
    b_o = tl.load(p_o, mask=m_t[:, None], other=0.0).to(tl.float32)
    b_o *= tl.exp2((b_lse - b_total) * LOG2_E)[:, None]
    tl.store(p_o, b_o.to(o.dtype.element_ty), mask=m_t[:, None])
