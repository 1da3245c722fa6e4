"""A kernel that convolves keys or values, with SiLU, and rotates keys, for both mixers; and its backward kernel."""

# Triton does not support starred tuples
# ruff: noqa: RUF005

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmix_core.chunking import cdiv, chunk_slots
from tokenmix_core.kernels import cached_launch, locate_chunk
from tokenmix_core.ops import conv1d_backward_tile, load_input, short_conv_sums_kernel, within
from tokenmix_oryx.ops.mixing.queries import silu_gradient

# number of tokens per program, and per iteration of its loop, in the forward
BT, BU = 32, 4


@cached_launch
@triton.jit(do_not_specialize=["T", "N"])
def _shared_forward(
    x, weight, cos, sin, y, rotated, cu_seqlens, stride_x, angles, T, N, H,
    K: tl.constexpr, W: tl.constexpr, BT: tl.constexpr, BU: tl.constexpr, SILU: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Convolve BT tokens of a head, BU per iteration, and rotate the results; registers hold the last W inputs."""
    HALF: tl.constexpr = K // 2
    i_h = tl.program_id(0) % H
    _, begin, length, first = locate_chunk(tl.program_id(0) // H, T, BT, N, cu_seqlens, PACKED)
    end = tl.minimum(first + BT, length)
    o_k = tl.arange(0, HALF)
    o_d = i_h * K + o_k
    m_d = o_d >= 0
    p_x = x + begin * stride_x + o_d
    p_angle = begin % angles * HALF + o_k
    b_w = ()
    b_x = ()
    for w in tl.static_range(W):
        b_first = tl.load(weight + o_d * W + w).to(tl.float32)
        b_w = b_w + (b_first, tl.load(weight + (o_d + HALF) * W + w).to(tl.float32))
        b_first = load_input(p_x, None, first - W + w, length, m_d, stride_x, W)
        b_x = b_x + (b_first, load_input(p_x + HALF, None, first - W + w, length, m_d, stride_x, W))
    for i in range(0, tl.maximum(end - first, 0), BU):
        b_new = ()
        for u in tl.static_range(BU):
            o_t = first + i + u
            p_new = p_x + o_t.to(tl.int64) * stride_x
            m_t = within(o_t, 0, end, m_d)
            b_new = b_new + (tl.load(p_new, mask=m_t, other=0.0), tl.load(p_new + HALF, mask=m_t, other=0.0))
        for u in tl.static_range(BU):
            o_t = first + i + u
            m_t = within(o_t, 0, end, m_d)
            b_x = b_x[2:] + (b_new[2 * u].to(tl.float32), b_new[2 * u + 1].to(tl.float32))
            b_lo = b_w[0] * b_x[0]
            b_hi = b_w[1] * b_x[1]
            for w in tl.static_range(1, W):
                b_lo += b_w[2 * w] * b_x[2 * w]
                b_hi += b_w[2 * w + 1] * b_x[2 * w + 1]
            if SILU:
                b_lo *= tl.sigmoid(b_lo)
                b_hi *= tl.sigmoid(b_hi)
            o_y = (begin + o_t) * (H * K) + o_d
            if y is not None:
                tl.store(y + o_y, b_lo.to(y.dtype.element_ty), mask=m_t)
                tl.store(y + o_y + HALF, b_hi.to(y.dtype.element_ty), mask=m_t)
            if rotated is not None:
                b_cos = tl.load(cos + p_angle + o_t * HALF, mask=m_t, other=1.0)
                b_sin = tl.load(sin + p_angle + o_t * HALF, mask=m_t, other=0.0)
                tl.store(rotated + o_y, (b_lo * b_cos - b_hi * b_sin).to(rotated.dtype.element_ty), mask=m_t)
                tl.store(rotated + o_y + HALF, (b_hi * b_cos + b_lo * b_sin).to(rotated.dtype.element_ty), mask=m_t)


@triton.jit
def load_sum(p_attention, p_linear, o_x, m_x, BOTH: tl.constexpr):
    """Load the gradient from attention in float32; with BOTH, add that from the linear mixer."""
    b_sum = tl.load(p_attention + o_x, mask=m_x, other=0.0).to(tl.float32)
    if BOTH:
        b_sum += tl.load(p_linear + o_x, mask=m_x, other=0.0).to(tl.float32)
    return b_sum


@cached_launch
@triton.jit(do_not_specialize=["T", "N", "BT"])
def _shared_backward(
    x, weight, cos, sin, dattention, dlinear, dx, dsums, cu_seqlens, stride_x, stride_dx, angles, T, N, BT, H,
    K: tl.constexpr, W: tl.constexpr, BU: tl.constexpr, SILU: tl.constexpr, ROTATE_LINEAR: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """Compute the gradients for BT tokens of a head, BU per iteration, like the backward of core's convolution.

    The gradient of the convolution's outputs is the sum of both mixers' gradients; if there are angles, attention's
    gradient (with ROTATE_LINEAR, both gradients) is first rotated back.
    """
    HALF: tl.constexpr = K // 2
    i_h = tl.program_id(0) % H
    i_c = tl.program_id(0) // H
    _, begin, length, first = locate_chunk(i_c, T, BT, N, cu_seqlens, PACKED)
    o_k = tl.arange(0, K)
    o_d = i_h * K + o_k
    # each channel's partner: the channel with which it is rotated as a pair
    o_partner = o_d + tl.where(o_k < HALF, HALF, -HALF)
    b_sign = tl.where(o_k < HALF, 1.0, -1.0)
    m_d = o_d >= 0
    end = tl.minimum(first + BT, length)
    E = H * K
    p_x = x + begin * stride_x + o_d
    p_angle = begin % angles * HALF + o_k % HALF
    p_attention = dattention + begin * E
    p_linear = dlinear + begin * E
    zero = tl.zeros([K], tl.float32)
    b_w = ()
    b_x = ()
    b_dz = ()
    b_sums = ()
    for w in tl.static_range(W):
        b_w = b_w + (tl.load(weight + o_d * W + w).to(tl.float32),)
        b_sums = b_sums + (zero,)
        b_dz = b_dz + (zero,)
        b_x = b_x + (load_input(p_x, None, first - W + w, length, m_d, stride_x, W),)

    for i in range(0, tl.maximum(end - first, 0) + W - 1, BU):
        b_xs = ()
        b_gs = ()
        for u in tl.static_range(BU):
            o_t = first + i + u
            m_t = within(o_t, 0, length, m_d)
            b_xs = b_xs + (tl.load(p_x + o_t.to(tl.int64) * stride_x, mask=m_t, other=0.0),)
            o_x = o_t.to(tl.int64) * E + o_d
            if cos is not None:
                b_cos = tl.load(cos + p_angle + o_t * HALF, mask=m_t, other=1.0)
                b_sin = tl.load(sin + p_angle + o_t * HALF, mask=m_t, other=0.0)
                b_g = load_sum(p_attention, p_linear, o_x, m_t, ROTATE_LINEAR) * b_cos
                o_p = o_t.to(tl.int64) * E + o_partner
                b_g += load_sum(p_attention, p_linear, o_p, m_t, ROTATE_LINEAR) * b_sin * b_sign
                if not ROTATE_LINEAR:
                    b_g += tl.load(p_linear + o_x, mask=m_t, other=0.0).to(tl.float32)
            else:
                b_g = load_sum(p_attention, p_linear, o_x, m_t, True)
            b_gs = b_gs + (b_g,)
        for u in tl.static_range(BU):
            o_t = first + i + u
            b_x = b_x[1:] + (b_xs[u].to(tl.float32),)
            b_new = b_gs[u]
            if SILU:
                b_z = zero
                for w in tl.static_range(W):
                    b_z += b_w[w] * b_x[w]
                b_new *= silu_gradient(b_z)
            b_dz = b_dz[1:] + (b_new,)
            # leave out the tokens from `end` on, which the next program computes
            b_own = tl.where(o_t < end, b_new, 0.0)
            b_added = ()
            for w in tl.static_range(W):
                b_added = b_added + (b_sums[w] + b_own * b_x[w],)
            b_sums = b_added
            b_dx = zero
            for w in tl.static_range(W):
                b_dx += b_w[W - 1 - w] * b_dz[w]
            o_s = o_t - (W - 1)
            p_s = dx + (begin + o_s) * stride_dx + o_d
            tl.store(p_s, b_dx.to(dx.dtype.element_ty), mask=within(o_s, first, end, m_d))
    # programs without tokens, which occur in packed batches, also write (zeros): the sum reads the entries of all
    # programs
    p_sums = dsums + tl.cast(i_c, tl.int64) * (W + 1) * E + o_d
    for w in tl.static_range(W):
        tl.store(p_sums + w * E, b_sums[w])


def shared_forward(
    x: Tensor, weight: Tensor, *, H: int, cu_seqlens, silu: bool, y: Tensor | None, rotated: Tensor | None = None,
    angles: tuple[Tensor, Tensor] | tuple[None, None] = (None, None),
) -> None:  # fmt: skip
    """Write conv(x), with SiLU if `silu`, to `y`, and the same rotated by `angles` to `rotated`; both may be None."""
    B, T, E = x.shape
    N = B if cu_seqlens is None else len(cu_seqlens) - 1
    cos, sin = angles
    _shared_forward[(chunk_slots(B, T, BT, cu_seqlens) * H,)](
        x=x, weight=weight, cos=cos, sin=sin, y=y, rotated=rotated, cu_seqlens=cu_seqlens, stride_x=x.stride(1),
        angles=1 if cos is None else cos.shape[0], T=T, N=N, H=H, K=E // H, W=weight.shape[1], BT=BT, BU=BU, SILU=silu,
        PACKED=cu_seqlens is not None, num_warps=1,
    )  # fmt: skip


def shared_backward(
    x: Tensor, weight: Tensor, *, H: int, cu_seqlens, silu: bool, dattention: Tensor, dlinear: Tensor, dx: Tensor,
    angles: tuple[Tensor, Tensor] | tuple[None, None] = (None, None), rotate_linear: bool = False,
) -> Tensor:  # fmt: skip
    """Return the gradient of `weight`, and write the gradient of x to `dx`.

    Args:
        dattention, dlinear: gradients of the inputs of attention and of the linear mixer, `[B, T, H, K]`.
        angles: angles by which attention's inputs are rotated and, with `rotate_linear`, also the linear mixer's.
    """
    B, T, E = x.shape
    W = weight.shape[1]
    N = B if cu_seqlens is None else len(cu_seqlens) - 1
    cos, sin = angles
    config = conv1d_backward_tile(B * T, E)
    runs = chunk_slots(B, T, config.BT, cu_seqlens)
    dsums = x.new_empty(runs, W + 1, E, dtype=torch.float32)
    _shared_backward[(runs * H,)](
        x=x, weight=weight, cos=cos, sin=sin, dattention=dattention, dlinear=dlinear, dx=dx, dsums=dsums,
        cu_seqlens=cu_seqlens, stride_x=x.stride(1), stride_dx=dx.stride(1), angles=1 if cos is None else cos.shape[0],
        T=T, N=N, BT=config.BT, H=H, K=E // H, W=W, BU=config.BU, SILU=silu, ROTATE_LINEAR=rotate_linear,
        PACKED=cu_seqlens is not None, num_warps=1 if cos is None else 2,
    )  # fmt: skip
    dweight = torch.empty_like(weight)
    # the last row of `dsums` is for the gradient of a bias, which these convolutions do not have
    short_conv_sums_kernel[(cdiv(E, 32), W)](
        dsums=dsums, dweight=dweight, dbias=None, runs=runs, D=E, W=W, BR=128, BD=32, num_warps=4
    )
    return dweight
