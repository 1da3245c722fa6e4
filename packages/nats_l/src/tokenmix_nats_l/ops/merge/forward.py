"""Forward kernel of the merge: a row is one head of a token; each program computes BR rows."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tokenmix_core.chunking import cdiv, next_power_of_2
from tokenmix_core.kernels import cached_launch, gdc_launch_and_wait

# number of elements of a tensor in a tile
_ELEMENTS = 2048


@triton.jit
def shares(logits, o_r, m_r, H, WEIGHED: tl.constexpr):
    """Return for the rows `o_r` the weights of the linear and of the softmax output, `[BR, 1]`; a token has H rows.

    With WEIGHED, weights are the softmax of the two `logits` of each head; else both are 1.
    """
    if WEIGHED:
        p_a = logits + (o_r // H) * (2 * H) + o_r % H
        b_a = tl.load(p_a, mask=m_r, other=0.0).to(tl.float32)
        b_b = tl.load(p_a + H, mask=m_r, other=0.0).to(tl.float32)
        b_w = tl.sigmoid(b_a - b_b)
        b_v = tl.sigmoid(b_b - b_a)
    else:
        b_w = tl.full(o_r.shape, 1.0, tl.float32)
        b_v = b_w
    return b_w[:, None], b_v[:, None]


@triton.jit
def inverse_rms(b_x, V, eps):
    """Return 1 / √(mean(x²) + eps) of each row, `[BR, 1]`; the channels of x from V on must be 0."""
    return tl.rsqrt(tl.sum(b_x * b_x, 1) / V + eps)[:, None]


@cached_launch
@triton.jit(do_not_specialize=["R"])
def merge_forward_kernel(
    linear, softmax, gate, linear_norm, softmax_norm, logits, y, R, H, V, eps,
    BR: tl.constexpr, BV: tl.constexpr, EACH: tl.constexpr, WEIGHED: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """Compute BR rows of y; with EACH, both outputs are normalised before their sum, else the sum is normalised.

    WEIGHED: whether the outputs have weights (see `shares`).
    """
    gdc_launch_and_wait(PDL)
    o_r, o_v = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR), tl.arange(0, BV)
    m_r, m_v = o_r < R, o_v < V
    m_x, o_x = m_r[:, None] & m_v[None, :], o_r[:, None] * V + o_v[None, :]
    b_l = tl.load(linear + o_x, mask=m_x, other=0.0).to(tl.float32)
    b_s = tl.load(softmax + o_x, mask=m_x, other=0.0).to(tl.float32)
    b_z = tl.load(gate + o_x, mask=m_x, other=0.0).to(tl.float32)
    b_gamma = tl.load(linear_norm + o_v, mask=m_v, other=0.0).to(tl.float32)[None, :]
    b_w, b_u = shares(logits, o_r, m_r, H, WEIGHED)
    if EACH:
        b_other = tl.load(softmax_norm + o_v, mask=m_v, other=0.0).to(tl.float32)[None, :]
        b_m = b_w * inverse_rms(b_l, V, eps) * b_l * b_gamma + b_u * inverse_rms(b_s, V, eps) * b_s * b_other
    else:
        b_m = b_w * b_l + b_u * b_s
        b_m = inverse_rms(b_m, V, eps) * b_m * b_gamma
    tl.store(y + o_x, (b_m * b_z * tl.sigmoid(b_z)).to(y.dtype.element_ty), mask=m_x)


def tile(V: int, elements: int) -> tuple[int, int]:
    """Return (BR, BV), the rows and channels of a tile with `elements` elements; BV ≥ V is a power of two."""
    BV = next_power_of_2(V)
    return max(1, elements // BV), BV


def merge_forward(linear, softmax, gate, linear_norm, softmax_norm, logits, eps: float) -> Tensor:
    """Return y `[B, T, H · V]`; all tensors must be contiguous."""
    B, T, H, V = linear.shape
    y = linear.new_empty(B, T, H * V)
    BR, BV = tile(V, _ELEMENTS)
    merge_forward_kernel[(cdiv(B * T * H, BR),)](
        linear=linear, softmax=softmax, gate=gate, linear_norm=linear_norm, softmax_norm=softmax_norm, logits=logits,
        y=y, R=B * T * H, H=H, V=V, eps=eps, BR=BR, BV=BV, EACH=softmax_norm is not None, WEIGHED=logits is not None,
        num_warps=4,
    )  # fmt: skip
    return y
