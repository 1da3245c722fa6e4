"""The rotation and its gradients, a block of heads at a time."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmix_core import tuning
from tokenmix_core.chunking import cdiv
from tokenmix_core.launch.kernels import cached_launch


@triton.jit
def load_halves(p_x, m_r, HALF: tl.constexpr, BH: tl.constexpr):
    """The halves of heads that begin at `p_x [BM]`, float32 `[BM, BH]`."""
    o_d = tl.arange(0, BH)
    mask = m_r[:, None] & (o_d < HALF)[None, :]
    p_x = p_x[:, None] + o_d[None, :]
    b_a = tl.load(p_x, mask=mask, other=0.0).to(tl.float32)
    return b_a, tl.load(p_x + HALF, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store_halves(p_x, b_a, b_b, m_r, HALF: tl.constexpr, BH: tl.constexpr):
    """Store them."""
    o_d = tl.arange(0, BH)
    mask = m_r[:, None] & (o_d < HALF)[None, :]
    p_x = p_x[:, None] + o_d[None, :]
    tl.store(p_x, b_a.to(p_x.dtype.element_ty), mask=mask)
    tl.store(p_x + HALF, b_b.to(p_x.dtype.element_ty), mask=mask)


@triton.jit
def load_angles(cos, sin, o_t, m_r, HALF: tl.constexpr, BH: tl.constexpr):
    """Cosines and sines of tokens, `[BM, BH]`."""
    o_d = tl.arange(0, BH)
    mask = m_r[:, None] & (o_d < HALF)[None, :]
    columns = (o_t * HALF)[:, None] + o_d[None, :]
    return tl.load(cos + columns, mask=mask, other=0.0), tl.load(sin + columns, mask=mask, other=0.0)


@cached_launch
@triton.jit(do_not_specialize=["rows", "turned"])
def rotate_kernel(
    x, weight, cos, sin, y, stride_x, rows, turned, H, eps, HALF: tl.constexpr, BM: tl.constexpr, BH: tl.constexpr
):
    """A block of heads; `turned` tokens have angles, which rows of a batch may share."""
    o_r = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    m_r = o_r < rows
    o_t = o_r // H
    b_a, b_b = load_halves(x + o_t * stride_x + (o_r % H) * 2 * HALF, m_r, HALF, BH)
    if weight is not None:
        o_d = tl.arange(0, BH)
        b_r = tl.rsqrt(tl.sum(b_a * b_a + b_b * b_b, 1) / (2 * HALF) + eps)[:, None]
        b_a *= b_r * tl.load(weight + o_d, mask=o_d < HALF, other=0.0).to(tl.float32)[None, :]
        b_b *= b_r * tl.load(weight + HALF + o_d, mask=o_d < HALF, other=0.0).to(tl.float32)[None, :]
    b_cos, b_sin = load_angles(cos, sin, o_t % turned, m_r, HALF, BH)
    store_halves(y + o_r * 2 * HALF, b_a * b_cos - b_b * b_sin, b_b * b_cos + b_a * b_sin, m_r, HALF, BH)


@cached_launch
@triton.jit(do_not_specialize=["rows", "turned"])
def rotate_backward_kernel(
    x, weight, cos, sin, dy, dx, dweights, stride_x, stride_dy, rows, turned, H, eps,
    HALF: tl.constexpr, BM: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """Every so-manieth block of heads, with this program's part of the weight's gradient in registers."""
    i_p = tl.program_id(0)
    o_d = tl.arange(0, BH)
    if weight is not None:
        b_w_a = tl.load(weight + o_d, mask=o_d < HALF, other=0.0).to(tl.float32)[None, :]
        b_w_b = tl.load(weight + HALF + o_d, mask=o_d < HALF, other=0.0).to(tl.float32)[None, :]
        b_dw_a = tl.zeros([BM, BH], tl.float32)
        b_dw_b = tl.zeros([BM, BH], tl.float32)
    for i_block in range(i_p, tl.cdiv(rows, BM), tl.num_programs(0)):
        o_r = (i_block * BM + tl.arange(0, BM)).to(tl.int64)
        m_r = o_r < rows
        o_t = o_r // H
        b_p, b_q = load_halves(dy + o_t * stride_dy + (o_r % H) * 2 * HALF, m_r, HALF, BH)
        b_cos, b_sin = load_angles(cos, sin, o_t % turned, m_r, HALF, BH)
        b_da = b_p * b_cos + b_q * b_sin
        b_db = b_q * b_cos - b_p * b_sin
        if weight is not None:
            b_a, b_b = load_halves(x + o_t * stride_x + (o_r % H) * 2 * HALF, m_r, HALF, BH)
            b_r = tl.rsqrt(tl.sum(b_a * b_a + b_b * b_b, 1) / (2 * HALF) + eps)[:, None]
            b_a *= b_r
            b_b *= b_r
            b_dw_a += b_da * b_a
            b_dw_b += b_db * b_b
            b_da *= b_w_a
            b_db *= b_w_b
            b_mean = (tl.sum(b_da * b_a + b_db * b_b, 1) / (2 * HALF))[:, None]
            b_da = b_r * (b_da - b_a * b_mean)
            b_db = b_r * (b_db - b_b * b_mean)
        store_halves(dx + o_r * 2 * HALF, b_da, b_db, m_r, HALF, BH)
    if weight is not None:
        p_dw = dweights + i_p * 2 * HALF + o_d
        tl.store(p_dw, tl.sum(b_dw_a, 0), mask=o_d < HALF)
        tl.store(p_dw + HALF, tl.sum(b_dw_b, 0), mask=o_d < HALF)


def rotate_forward(x: Tensor, weight: Tensor | None, cos: Tensor, sin: Tensor, H: int, eps: float) -> Tensor:
    """y `[tokens, H · K]` of x, tokens of one stride; cos and sin `[turned, K / 2]`, contiguous."""
    tokens, width = x.shape
    y = torch.empty((tokens, width), dtype=x.dtype, device=x.device)
    tile = tuning.row_tile(width // H // 2)
    rotate_kernel[(cdiv(tokens * H, tile.BM),)](
        x=x, weight=weight, cos=cos, sin=sin, y=y, stride_x=x.stride(0), rows=tokens * H, turned=len(cos), H=H,
        eps=eps, HALF=width // H // 2, BM=tile.BM, BH=tile.BD, num_warps=tile.num_warps,
    )  # fmt: skip
    return y


def rotate_backward(
    x: Tensor | None, weight: Tensor | None, cos: Tensor, sin: Tensor, dy: Tensor, H: int, eps: float
) -> tuple[Tensor, Tensor | None]:
    """dx, and dweight where there is a weight; x is needed there alone."""
    tokens, width = dy.shape
    K, tile = width // H, tuning.row_tile(width // H // 2)
    programs = tuning.row_programs(cdiv(tokens * H, tile.BM))
    dx = torch.empty((tokens, width), dtype=dy.dtype, device=dy.device)
    dweights = None
    if weight is not None:
        dweights = torch.empty((programs, K), dtype=torch.float32, device=dy.device)
    rotate_backward_kernel[(programs,)](
        x=x, weight=weight, cos=cos, sin=sin, dy=dy, dx=dx, dweights=dweights,
        stride_x=0 if x is None else x.stride(0), stride_dy=dy.stride(0), rows=tokens * H, turned=len(cos), H=H,
        eps=eps, HALF=K // 2, BM=tile.BM, BH=tile.BD, num_warps=tile.num_warps,
    )  # fmt: skip
    return dx, None if dweights is None or weight is None else dweights.sum(0).to(weight.dtype)
