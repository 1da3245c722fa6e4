"""The convolution over whole sequences, and one step of decoding in place."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmix_core.chunking import cdiv, chunk_slots
from tokenmix_core.tile.launch import cached_launch
from tokenmix_core.tile.sequences import locate_chunk
from tokenmix_core.tuning import ShortConvTile


@triton.jit
def load_inputs(p_x, p_initial, first, o_r, length, o_d, m_d, stride_x, W: tl.constexpr):
    """Inputs in float32 at the positions `first + o_r` of a sequence, where `p_x` is its row `first`.

    Positions before 0 come from the initial state at `p_initial` (None is zero), those from `length` on are zero.
    """
    o_t = first + o_r
    m_x = ((o_t >= 0) & (o_t < length))[:, None] & m_d[None, :]
    b_x = tl.load(p_x + o_r[:, None] * stride_x + o_d[None, :], mask=m_x, other=0.0).to(tl.float32)
    if p_initial is not None:
        m_s = ((o_t < 0) & (o_t > -W))[:, None] & m_d[None, :]
        p_s = p_initial + o_d[None, :] * (W - 1) + (o_t + (W - 1))[:, None]
        b_x += tl.load(p_s, mask=m_s, other=0.0).to(tl.float32)
    return b_x


@triton.jit
def convolve(p_x, p_initial, weight, bias, first, o_r, length, o_d, m_d, stride_x, W: tl.constexpr):
    """The sums before the activation, float32, at the positions `first + o_r`."""
    b_z = tl.zeros([o_r.shape[0], o_d.shape[0]], tl.float32)
    if bias is not None:
        b_z += tl.load(bias + o_d, mask=m_d, other=0.0).to(tl.float32)[None, :]
    for w in tl.static_range(W):
        b_w = tl.load(weight + o_d * W + w, mask=m_d, other=0.0).to(tl.float32)
        b_x = load_inputs(p_x, p_initial, first, o_r + (w - W + 1), length, o_d, m_d, stride_x, W)
        b_z += b_x * b_w[None, :]
    return b_z


@cached_launch
@triton.jit(do_not_specialize=["T", "N"])
def short_conv_forward_kernel(
    x, weight, bias, initial_state, o, final_state, cu_seqlens, stride_x, T, N, D,
    W: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, SILU: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    i_n, begin, length, first = locate_chunk(tl.program_id(0), T, BT, N, cu_seqlens, PACKED)
    # an empty sequence has one chunk too, which hands its initial state on
    if first >= tl.maximum(length, 1):
        return
    o_d = tl.program_id(1) * BD + tl.arange(0, BD)
    m_d = o_d < D
    o_r = tl.arange(0, BT)
    o_state = tl.cast(i_n, tl.int64) * D * (W - 1)
    p_x = x + (begin + first) * stride_x
    p_initial = initial_state
    if initial_state is not None:
        p_initial += o_state
    b_o = convolve(p_x, p_initial, weight, bias, first, o_r, length, o_d, m_d, stride_x, W)
    if SILU:
        b_o *= tl.sigmoid(b_o)
    p_o = o + (begin + first) * D + o_r[:, None] * D + o_d[None, :]
    tl.store(p_o, b_o.to(o.dtype.element_ty), mask=(first + o_r < length)[:, None] & m_d[None, :])

    if first + BT >= length:
        o_w = tl.arange(0, 8)
        o_last = length - first - (W - 1) + o_w
        b_x = load_inputs(p_x, p_initial, first, o_last, length, o_d, m_d, stride_x, W)
        p_s = final_state + o_state + o_d[None, :] * (W - 1) + o_w[:, None]
        tl.store(p_s, b_x.to(final_state.dtype.element_ty), mask=(o_w < W - 1)[:, None] & m_d[None, :])


def short_conv_forward(x, weight, bias, activation, initial_state, cu_seqlens, config: ShortConvTile):
    """o `[B, T, D]` and the last inputs of each sequence `[N, D, W − 1]`; the tokens of x lie at one stride."""
    B, T, D = x.shape
    W = weight.shape[1]
    N = B if cu_seqlens is None else len(cu_seqlens) - 1
    o = torch.empty((B, T, D), dtype=x.dtype, device=x.device)
    final_state = torch.empty((N, D, W - 1), dtype=x.dtype, device=x.device)
    short_conv_forward_kernel[(chunk_slots(B, T, config.BT, cu_seqlens), cdiv(D, config.BD))](
        x, weight, bias, initial_state, o, final_state, cu_seqlens, x.stride(1), T, N, D,
        W, config.BT, config.BD, activation == "silu", cu_seqlens is not None, num_warps=config.num_warps,
    )  # fmt: skip
    return o, final_state


@cached_launch
@triton.jit
def short_conv_step_kernel(
    x, weight, bias, state, o, stride_x, D, W: tl.constexpr, BD: tl.constexpr, SILU: tl.constexpr
):
    i_b = tl.program_id(0).to(tl.int64)
    o_d = tl.program_id(1) * BD + tl.arange(0, BD)
    m_d = o_d < D
    p_s = state + (i_b * D + o_d) * (W - 1)
    b_o = tl.zeros([BD], tl.float32)
    if bias is not None:
        b_o += tl.load(bias + o_d, mask=m_d, other=0.0).to(tl.float32)
    for w in tl.static_range(W - 1):
        b_x = tl.load(p_s + w, mask=m_d, other=0.0)
        b_o += b_x.to(tl.float32) * tl.load(weight + o_d * W + w, mask=m_d, other=0.0).to(tl.float32)
        if w > 0:
            tl.store(p_s + w - 1, b_x, mask=m_d)
    b_x = tl.load(x + i_b * stride_x + o_d, mask=m_d, other=0.0)
    b_o += b_x.to(tl.float32) * tl.load(weight + o_d * W + W - 1, mask=m_d, other=0.0).to(tl.float32)
    tl.store(p_s + W - 2, b_x, mask=m_d)
    if SILU:
        b_o *= tl.sigmoid(b_o)
    tl.store(o + i_b * D + o_d, b_o.to(o.dtype.element_ty), mask=m_d)


def short_conv_step(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, activation: str | None) -> Tensor:
    """o `[B, D]` of one token; `state` takes the token in."""
    B, D = x.shape
    o = torch.empty((B, D), dtype=x.dtype, device=x.device)
    BD = 256
    short_conv_step_kernel[(B, cdiv(D, BD))](
        x, weight, bias, state, o, x.stride(0), D, weight.shape[1], BD, activation == "silu", num_warps=2
    )
    return o
