"""Gradients of the convolution: of its inputs and both states, and partial sums of those of weight and bias."""

import torch
import triton
import triton.language as tl

from tokenmix_core.chunking import cdiv, chunk_slots
from tokenmix_core.ops.short_conv.forward import convolve, load_inputs
from tokenmix_core.tile.launch import cached_launch
from tokenmix_core.tile.sequences import locate_chunk
from tokenmix_core.tuning import ShortConvTile


@cached_launch
@triton.jit(do_not_specialize=["T", "N"])
def sum_gradient_kernel(
    x, weight, bias, initial_state, do, dz, dsums, cu_seqlens, stride_x, stride_do, T, N, D,
    W: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, SILU: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """The gradient of the sums before the activation, and what a chunk adds to those of weight and bias."""
    i_c = tl.program_id(0)
    i_n, begin, length, first = locate_chunk(i_c, T, BT, N, cu_seqlens, PACKED)
    o_d = tl.program_id(1) * BD + tl.arange(0, BD)
    m_d = o_d < D
    o_r = tl.arange(0, BT)
    p_x = x + (begin + first) * stride_x
    p_initial = initial_state
    if initial_state is not None:
        p_initial += tl.cast(i_n, tl.int64) * D * (W - 1)
    b_dz = load_inputs(do + (begin + first) * stride_do, None, first, o_r, length, o_d, m_d, stride_do, W)
    if SILU:
        b_z = convolve(p_x, p_initial, weight, bias, first, o_r, length, o_d, m_d, stride_x, W)
        b_sigmoid = tl.sigmoid(b_z)
        b_dz *= b_sigmoid * (1.0 + b_z * (1.0 - b_sigmoid))
        p_dz = dz + (begin + first) * D + o_r[:, None] * D + o_d[None, :]
        tl.store(p_dz, b_dz.to(dz.dtype.element_ty), mask=(first + o_r < length)[:, None] & m_d[None, :])
    # unused slots of a packed batch, where first is past the length, write zeros for the sum over slots
    p_sums = dsums + tl.cast(i_c, tl.int64) * (W + 1) * D + o_d
    for w in tl.static_range(W):
        b_x = load_inputs(p_x, p_initial, first, o_r + (w - W + 1), length, o_d, m_d, stride_x, W)
        tl.store(p_sums + w * D, tl.sum(b_dz * b_x, 0), mask=m_d)
    tl.store(p_sums + W * D, tl.sum(b_dz, 0), mask=m_d)


@triton.jit
def input_gradient(p_dz, p_final, weight, first, o_r, length, o_d, m_d, stride_dz, W: tl.constexpr):
    """The gradient of the inputs, float32, at the positions `first + o_r`; from −W + 1 to −1 lies the initial state."""
    b_dx = tl.zeros([o_r.shape[0], o_d.shape[0]], tl.float32)
    for w in tl.static_range(W):
        b_w = tl.load(weight + o_d * W + w, mask=m_d, other=0.0).to(tl.float32)
        b_dx += load_inputs(p_dz, None, first, o_r + (W - 1 - w), length, o_d, m_d, stride_dz, W) * b_w[None, :]
    if p_final is not None:
        o_w = first + o_r - length + (W - 1)
        m_s = ((o_w >= 0) & (o_w < W - 1))[:, None] & m_d[None, :]
        b_dx += tl.load(p_final + o_d[None, :] * (W - 1) + o_w[:, None], mask=m_s, other=0.0).to(tl.float32)
    return b_dx


@cached_launch
@triton.jit(do_not_specialize=["T", "N"])
def input_gradient_kernel(
    dz, weight, final_gradient, dx, initial_gradient, cu_seqlens, stride_dz, T, N, D,
    W: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    i_n, begin, length, first = locate_chunk(tl.program_id(0), T, BT, N, cu_seqlens, PACKED)
    # an empty sequence has one chunk too, which hands the gradient of its state back
    if first >= tl.maximum(length, 1):
        return
    o_d = tl.program_id(1) * BD + tl.arange(0, BD)
    m_d = o_d < D
    o_r = tl.arange(0, BT)
    o_state = tl.cast(i_n, tl.int64) * D * (W - 1)
    p_dz = dz + (begin + first) * stride_dz
    p_final = final_gradient
    if final_gradient is not None:
        p_final += o_state
    b_dx = input_gradient(p_dz, p_final, weight, first, o_r, length, o_d, m_d, stride_dz, W)
    p_dx = dx + (begin + first) * D + o_r[:, None] * D + o_d[None, :]
    tl.store(p_dx, b_dx.to(dx.dtype.element_ty), mask=(first + o_r < length)[:, None] & m_d[None, :])
    # one condition is known when compiling, the other is not
    if initial_gradient is not None:  # noqa: SIM102
        if first == 0:
            o_w = tl.arange(0, 8)
            b_ds = input_gradient(p_dz, p_final, weight, first, o_w - (W - 1), length, o_d, m_d, stride_dz, W)
            p_ds = initial_gradient + o_state + o_d[None, :] * (W - 1) + o_w[:, None]
            m_s = (o_w < W - 1)[:, None] & m_d[None, :]
            tl.store(p_ds, b_ds.to(initial_gradient.dtype.element_ty), mask=m_s)


def short_conv_backward(
    x, weight, bias, activation, initial_state, cu_seqlens, do, final_gradient, config: ShortConvTile
):
    """Gradients of x, weight, bias and the initial state; the latter two None where their tensors are."""
    B, T, D = x.shape
    W = weight.shape[1]
    N = B if cu_seqlens is None else len(cu_seqlens) - 1
    chunks = chunk_slots(B, T, config.BT, cu_seqlens)
    dx = torch.empty((B, T, D), dtype=x.dtype, device=x.device)
    # sums over the tokens of a chunk, then over chunks: a fixed order, so the result never changes between runs
    dsums = torch.empty((chunks, W + 1, D), dtype=torch.float32, device=x.device)
    initial_gradient = None if initial_state is None else torch.empty_like(initial_state)
    silu, packed = activation == "silu", cu_seqlens is not None
    # without an activation the sums' gradient is do itself
    dz = torch.empty((B, T, D), dtype=x.dtype, device=x.device) if silu else do
    grid = (chunks, cdiv(D, config.BD))
    sum_gradient_kernel[grid](
        x, weight, bias, initial_state, do, dz, dsums, cu_seqlens, x.stride(1), do.stride(1), T, N, D,
        W, config.BT, config.BD, silu, packed, num_warps=config.num_warps,
    )  # fmt: skip
    input_gradient_kernel[grid](
        dz, weight, final_gradient, dx, initial_gradient, cu_seqlens, dz.stride(1), T, N, D,
        W, config.BT, config.BD, packed, num_warps=config.num_warps,
    )  # fmt: skip
    dsums = dsums.sum(0)
    # copies, since results of a custom op share no memory
    dweight = torch.empty_like(weight).copy_(dsums[:W].T)
    return dx, dweight, None if bias is None else torch.empty_like(bias).copy_(dsums[W]), initial_gradient
