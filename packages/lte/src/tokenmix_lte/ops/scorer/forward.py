"""One Triton kernel for the logits: a program computes all layers for a tile of tokens and the neighbours they need."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmix_core.chunking import chunk_slots, num_sequences
from tokenmix_core.kernels import FLOAT32_DOT, cached_launch
from tokenmix_lte.ops.scorer.sizes import Sizes, Taps
from tokenmix_lte.ops.scorer.tokens import (
    apply_dropout,
    dropout_scale,
    load_channels,
    locate_tokens,
    mark_dropped,
    store_channels,
)
from tokenmix_lte.ops.scorer.types import Inputs


@triton.jit
def load_tap(w, i_tap, i_h, H, CI, CO, i_in, C, BI: tl.constexpr, BO: tl.constexpr):
    """Load a tap's weights `[BI, BO]` for the C input channels from `i_in` on; w is `[taps, H, CI, CO]`."""
    o_i, o_o = tl.arange(0, BI), tl.arange(0, BO)
    p_w = w + ((i_tap * H + i_h) * CI + i_in + o_i[:, None]) * CO + o_o[None, :]
    return tl.load(p_w, mask=(o_i < C)[:, None] & (o_o < CO)[None, :], other=0.0)


@triton.jit
def load_bias(bias, i_h, C, BT: tl.constexpr, BC: tl.constexpr):
    """Load the C biases of a head, in float32, as BT equal rows."""
    o_c = tl.arange(0, BC)
    b_bias = tl.load(bias + i_h * C + o_c, mask=o_c < C, other=0.0).to(tl.float32)
    return tl.zeros([BT, BC], tl.float32) + b_bias[None, :]


@triton.jit
def shift_rows(b_x, OFFSET: tl.constexpr):
    """Return x with row t + OFFSET in row t; beyond the tile, its first or last row is repeated."""
    if OFFSET != 0:
        o_t = tl.minimum(tl.maximum(tl.arange(0, b_x.shape[0]) + OFFSET, 0), b_x.shape[0] - 1)
        b_x = tl.gather(b_x, tl.broadcast_to(o_t[:, None], b_x.shape), 0)
    return b_x


@triton.jit
def convolve(b_x, w, bias, i_h, H, CI, CO, BI: tl.constexpr, BO: tl.constexpr, taps):
    """Return the outputs of a convolution for a tile of tokens in float32, before SiLU."""
    b_z = load_bias(bias, i_h, CO, b_x.shape[0], BO)
    for i in tl.static_range(taps.count):
        b_w = load_tap(w, i, i_h, H, CI, CO, 0, CI, BI, BO)
        b_z = tl.dot(shift_rows(b_x, taps.first + i * taps.step), b_w, b_z, input_precision=FLOAT32_DOT)
    return b_z


@cached_launch
@triton.jit(do_not_specialize=["T", "N", "slots"])
def scorer_kernel(
    k, v, w1, bias1, w2, bias2, w3, bias3, weight, bias, begin, cu_seqlens, seed, logits, dlogits, z1, z2, dz3, dlast,
    T, N, slots, H, threshold, K, C1, C2, C3, BT: tl.constexpr, BK: tl.constexpr, B1: tl.constexpr, B2: tl.constexpr,
    B3: tl.constexpr, TAPS: tl.constexpr, FIRST: tl.constexpr, STEP: tl.constexpr, DROPOUT: tl.constexpr,
    GRADIENTS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Compute the logits of the inner tokens of a tile of BT tokens; with GRADIENTS, the inputs of the backward.

        tokens of a tile:   | before | OWN tokens whose logits it stores | after |   before + after = 2 SPAN
        layer 1, from k and v   BT valid rows          layers read rows t + FIRST, t + FIRST + STEP, …,
        layer 2                 BT − SPAN valid rows   t + FIRST + SPAN, so each layer has SPAN fewer valid rows
        layer 3, linear map     OWN valid rows

    With GRADIENTS it stores z¹ and z², the inputs of SiLU, the gradient dz3 of z³, and partial sums of the gradients of
    the linear map's C3 weights and its bias.
    """
    SPAN: tl.constexpr = (TAPS - 1) * STEP
    # each of the two layers after the first reads SPAN more rows than it computes, so BT − 2 SPAN rows remain
    OWN: tl.constexpr = BT - 2 * SPAN
    i_h = tl.program_id(1)
    i_row, start, end, first = locate_tokens(tl.program_id(0), slots, T, OWN, N, begin, cu_seqlens, PACKED)
    # nested conditions: GRADIENTS is known at compile time, `first >= end` only at run time
    if not GRADIENTS:  # noqa: SIM102
        if first >= end:
            return
    o_t = first + 2 * FIRST + tl.arange(0, BT)
    m_t = (o_t >= start) & (o_t < end)
    m_own = (o_t >= first) & (o_t < tl.minimum(first + OWN, end))
    o_row = (i_row + o_t) * H + i_h
    b_z1 = load_bias(bias1, i_h, C1, BT, B1)
    for i in range(TAPS):
        o_s = o_t + (FIRST + i * STEP)
        m_s = (o_s >= start) & (o_s < end)
        o_s = (i_row + o_s) * H + i_h
        b_k = apply_dropout(load_channels(k, o_s, m_s, K, BK), seed, threshold, o_s, 0, 0, DROPOUT)
        b_z1 = tl.dot(b_k, load_tap(w1, i, i_h, H, 2 * K, C1, 0, K, BK, B1), b_z1, input_precision=FLOAT32_DOT)
        b_v = apply_dropout(load_channels(v, o_s, m_s, K, BK), seed, threshold, o_s, (K + 1) // 2, 0, DROPOUT)
        b_z1 = tl.dot(b_v, load_tap(w1, i, i_h, H, 2 * K, C1, K, K, BK, B1), b_z1, input_precision=FLOAT32_DOT)
    scale = dropout_scale(threshold, DROPOUT)
    b_z1 = mark_dropped(b_z1, seed, threshold, o_row, 1, DROPOUT)
    # a token that does not exist is 0 in the input of every layer
    b_x = tl.where(m_t[:, None], b_z1 * tl.sigmoid(b_z1) * scale, 0.0).to(k.dtype.element_ty)
    b_z2 = convolve(b_x, w2, bias2, i_h, H, C1, C2, B1, B2, Taps(TAPS, FIRST, STEP))
    b_z2 = mark_dropped(b_z2, seed, threshold, o_row, 2, DROPOUT)
    b_x = tl.where(m_t[:, None], b_z2 * tl.sigmoid(b_z2) * scale, 0.0).to(k.dtype.element_ty)
    b_z3 = convolve(b_x, w3, bias3, i_h, H, C2, C3, B2, B3, Taps(TAPS, FIRST, STEP))
    b_sigmoid = tl.sigmoid(b_z3)
    b_x3 = b_z3 * b_sigmoid
    o_c = tl.arange(0, B3)
    b_w = tl.load(weight + i_h * C3 + o_c, mask=o_c < C3, other=0.0).to(tl.float32)
    if GRADIENTS:
        b_d = tl.load(dlogits + o_row, mask=m_own & m_t, other=0.0).to(tl.float32)
        store_channels(z1, b_z1, o_row, m_own, C1, B1)
        store_channels(z2, b_z2, o_row, m_own, C2, B2)
        b_dz = b_d[:, None] * b_w[None, :] * b_sigmoid * (1.0 + b_z3 * (1.0 - b_sigmoid))
        store_channels(dz3, b_dz, o_row, m_own, C3, B3)
        p_last = dlast + (tl.program_id(0).to(tl.int64) * H + i_h) * (C3 + 1)
        tl.store(p_last + o_c, tl.sum(b_d[:, None] * b_x3, 0), mask=o_c < C3)
        tl.store(p_last + C3, tl.sum(b_d, 0))
    else:
        b_logits = tl.sum(b_x3 * b_w[None, :], 1) + tl.load(bias + i_h).to(tl.float32)
        tl.store(logits + o_row, b_logits, mask=m_own)


def scorer_forward(x: Inputs, sizes: Sizes) -> Tensor:
    """Return logits `[B, T, H]`, float32."""
    logits = x.k.new_empty(x.k.shape[:3], dtype=torch.float32)
    _launch(x, sizes, logits=logits)
    return logits


def scorer_recompute(x: Inputs, dlogits: Tensor, sizes: Sizes) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Recompute activations of the forward pass for the backward pass, and gradients of the linear map.

    Returns:
        z¹, z² and the gradient of z³ `[B, T, H, C]`, where layer i applies SiLU to zⁱ; the gradients of the linear
        map's weights `[H, C3]` and bias `[H]`, float32.
    """
    B, T, H, _ = x.k.shape
    *_, C3 = sizes.channels
    z1, z2, dz3 = (x.k.new_empty(B, T, H, C) for C in sizes.channels[1:])
    dlast = x.k.new_empty(chunk_slots(B, T, sizes.own, x.cu_seqlens), H, C3 + 1, dtype=torch.float32)
    _launch(x, sizes, dlogits=dlogits, z1=z1, z2=z2, dz3=dz3, dlast=dlast)
    sums = dlast.sum(0)
    return z1, z2, dz3, sums[:, :C3], sums[:, C3]


def _launch(
    x: Inputs, sizes: Sizes, *, logits=None, dlogits=None, z1=None, z2=None, dz3=None, dlast=None
) -> None:  # fmt: skip
    """Launch the kernel: write the logits or, if `dlogits` are given, the results of `scorer_recompute`."""
    B, T, H, _ = x.k.shape
    slots, tile = chunk_slots(B, T, sizes.own, x.cu_seqlens), sizes.layers
    (K, C1, C2, C3), (BK, B1, B2, B3), (TAPS, FIRST, STEP) = sizes.channels, sizes.blocks, sizes.taps
    scorer_kernel[(slots, H)](
        k=x.k, v=x.v, w1=x.w1, bias1=x.bias1, w2=x.w2, bias2=x.bias2, w3=x.w3, bias3=x.bias3, weight=x.weight,
        bias=x.bias, begin=x.begin, cu_seqlens=x.cu_seqlens, seed=x.seed, logits=logits, dlogits=dlogits, z1=z1, z2=z2,
        dz3=dz3, dlast=dlast, T=T, N=num_sequences(x.k, x.cu_seqlens), slots=slots, H=H, threshold=x.threshold,
        K=K, C1=C1, C2=C2, C3=C3, BT=tile.BT, BK=BK, B1=B1, B2=B2, B3=B3, TAPS=TAPS, FIRST=FIRST, STEP=STEP,
        DROPOUT=x.seed is not None, GRADIENTS=dlogits is not None, PACKED=x.cu_seqlens is not None,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
