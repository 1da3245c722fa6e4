"""Logits on Hopper: a program walks along 64 streams of a head, and makes a block of every layer at each step."""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, warpgroup_mma_wait

from tokenmix_core.chunking import num_sequences
from tokenmix_core.launch.kernels import cached_launch
from tokenmix_core.tile.hopper import mma_layout_split_n, row_layout, wait_async_copies
from tokenmix_lte.ops.scorer.hopper.streams import (
    STREAMS,
    begin_convolution,
    drop_tokens,
    enlarged,
    exist,
    fetch_tokens,
    fetch_weights,
    held,
    locate_streams,
    rows_of,
    sigmoid,
    store_layer,
    stream_blocks,
)
from tokenmix_lte.ops.scorer.sizes import RING, Sizes
from tokenmix_lte.ops.scorer.steps import Inputs

_RING = gl.constexpr(RING)


@cached_launch
@gluon.jit(do_not_specialize=["T", "N", "slots", "tokens", "threshold"])
def hopper_scorer_kernel(
    k, v, w1, bias1, w2, bias2, w3, bias3, weight, bias, begin, cu_seqlens, seed, logits, dlogits, z1, z2, dz3, dlast,
    T, N, slots, tokens, H, threshold, K: gl.constexpr, C1: gl.constexpr, C2: gl.constexpr, C3: gl.constexpr,
    FIRST: gl.constexpr, STEP: gl.constexpr, DROPOUT: gl.constexpr, GRADIENTS: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """As `forward.scorer_kernel`, for streams of slots of `tokens` tokens.

    Step s begins block s of layer 1, of inputs s … s + 2, block s − 3 of layer 2 and block s − 6 of layer 3, which need
    nothing of each other. A block is at the place of the first one that it is made of.
    """
    W: gl.constexpr = gl.num_warps()
    dtype: gl.constexpr = k.dtype.element_ty
    tile1: gl.constexpr = mma_layout_split_n(C1, W)
    tile2: gl.constexpr = mma_layout_split_n(C2, W)
    tile3: gl.constexpr = mma_layout_split_n(C3, W)
    i_b, i_h = gl.program_id(0), gl.program_id(1)
    # keys and values of a block in turn
    x0 = gl.allocate_shared_memory(dtype, [2 * _RING, STREAMS, K], rows_of(K))
    x1 = gl.allocate_shared_memory(dtype, [4, STREAMS, C1], rows_of(C1))
    x2 = gl.allocate_shared_memory(dtype, [4, STREAMS, C2], rows_of(C2))
    w1_s = gl.allocate_shared_memory(dtype, [6, K, C1], rows_of(C1))
    w2_s = gl.allocate_shared_memory(dtype, [3, C1, C2], rows_of(C2))
    w3_s = gl.allocate_shared_memory(dtype, [3, C2, C3], rows_of(C3))
    fetch_weights(w1_s, w1, i_h, H, W)
    fetch_weights(w2_s, w2, i_h, H, W)
    fetch_weights(w3_s, w3, i_h, H, W)
    streams = locate_streams(
        i_b, i_h, slots, tokens, T, N, H, begin, cu_seqlens, STEP, PACKED, W, gl.SliceLayout(1, row_layout(K, W))
    )
    streams1 = held(streams, gl.SliceLayout(1, tile1))
    streams2 = held(streams, gl.SliceLayout(1, tile2))
    streams3 = held(streams, gl.SliceLayout(1, tile3))
    for i in gl.static_range(_RING - 1):
        o_t = 3 * FIRST + i * STEP
        fetch_tokens(x0.index(2 * i), k, streams, o_t, H, K, W)
        fetch_tokens(x0.index(2 * i + 1), v, streams, o_t, H, K, W)
        async_copy.commit_group()
    o_1 = gl.arange(0, C1, gl.SliceLayout(0, tile1))
    o_2 = gl.arange(0, C2, gl.SliceLayout(0, tile2))
    o_3 = gl.arange(0, C3, gl.SliceLayout(0, tile3))
    b_bias1 = gl.load(bias1 + i_h * C1 + o_1).to(gl.float32)
    b_bias2 = gl.load(bias2 + i_h * C2 + o_2).to(gl.float32)
    b_bias3 = gl.load(bias3 + i_h * C3 + o_3).to(gl.float32)
    b_w = gl.load(weight + i_h * C3 + o_3).to(gl.float32)
    if GRADIENTS:
        b_dw = gl.zeros([STREAMS, C3], gl.float32, tile3)
        b_dbias = gl.zeros([STREAMS], gl.float32, gl.SliceLayout(1, tile3))
        b_d = b_dbias
    else:
        b_bias = gl.load(bias + i_h).to(gl.float32)
    if DROPOUT:
        wait_async_copies(_RING - 4)
        for i in gl.static_range(3):
            o_t = 3 * FIRST + i * STEP
            drop_tokens(x0.index(2 * i), seed, threshold, streams, o_t, H, 0, W)
            drop_tokens(x0.index(2 * i + 1), seed, threshold, streams, o_t, H, K, W)
    scale = enlarged(threshold, DROPOUT)
    zero1 = gl.zeros([STREAMS, C1], gl.float32, tile1)
    zero2 = gl.zeros([STREAMS, C2], gl.float32, tile2)
    zero3 = gl.zeros([STREAMS, C3], gl.float32, tile3)
    for s in range(tokens // STEP + 6):
        # every warp has left the products of the step before, and sees what the others stored
        wait_async_copies(_RING - 5)
        new, o_t = (s + _RING - 1) % _RING * 2, (s + _RING - 1) * STEP + 3 * FIRST
        fetch_tokens(x0.index(new), k, streams, o_t, H, K, W)
        fetch_tokens(x0.index(new + 1), v, streams, o_t, H, K, W)
        async_copy.commit_group()
        b_z3 = begin_convolution(x2, w3_s, s + 2, zero3)
        b_z2 = begin_convolution(x1, w2_s, s + 1, zero2)
        b_z1 = begin_convolution(x0, w1_s, s, zero1)
        if DROPOUT:
            new, o_t = (s + 3) % _RING * 2, (s + 3) * STEP + 3 * FIRST
            drop_tokens(x0.index(new), seed, threshold, streams, o_t, H, 0, W)
            drop_tokens(x0.index(new + 1), seed, threshold, streams, o_t, H, K, W)

        b_z3 = warpgroup_mma_wait(9, deps=[b_z3]) * scale + b_bias3[None, :]
        b_sigmoid = sigmoid(b_z3)
        b_x3 = b_z3 * b_sigmoid
        o_t = (s - 6) * STEP
        o_row = streams3[0] + o_t * H
        m_own = (o_t >= 0) & (o_t < streams3[2])
        if GRADIENTS:
            m_own = m_own & exist(streams3, o_t)
            b_dw += gl.where(m_own[:, None], b_d[:, None] * b_x3, 0.0)
            b_dbias += b_d
            b_dz = b_d[:, None] * b_w[None, :] * b_sigmoid * (1.0 + b_z3 * (1.0 - b_sigmoid))
            gl.store(dz3 + o_row[:, None] * C3 + o_3[None, :], b_dz.to(dtype), mask=m_own[:, None])
            # the next step's
            m_own = exist(streams3, o_t + STEP) & (o_t + STEP >= 0)
            b_d = gl.load(dlogits + (o_row + STEP * H), mask=m_own, other=0.0).to(gl.float32)
        else:
            gl.store(logits + o_row, gl.sum(b_x3 * b_w[None, :], 1) + b_bias, mask=m_own)

        b_z2 = warpgroup_mma_wait(6, deps=[b_z2]) * scale + b_bias2[None, :]
        o_t = (s - 3) * STEP + FIRST
        store_layer(x2.index((s + 1) % 4), b_z2, seed, threshold, streams2, o_t, H, 2, DROPOUT, tile2)
        if GRADIENTS:
            m_own = exist(streams2, o_t) & (o_t >= 0) & (o_t < tokens)
            p_z = z2 + (streams2[0] + o_t * H)[:, None] * C2 + o_2[None, :]
            gl.store(p_z, b_z2.to(dtype), mask=m_own[:, None])

        b_z1 = warpgroup_mma_wait(0, deps=[b_z1]) * scale + b_bias1[None, :]
        o_t = s * STEP + 2 * FIRST
        store_layer(x1.index(s % 4), b_z1, seed, threshold, streams1, o_t, H, 1, DROPOUT, tile1)
        if GRADIENTS:
            m_own = exist(streams1, o_t) & (o_t >= 0) & (o_t < tokens)
            p_z = z1 + (streams1[0] + o_t * H)[:, None] * C1 + o_1[None, :]
            gl.store(p_z, b_z1.to(dtype), mask=m_own[:, None])
    wait_async_copies(0)
    if GRADIENTS:
        p_last = dlast + (i_b.to(gl.int64) * H + i_h) * (C3 + 1)
        gl.store(p_last + o_3, gl.sum(b_dw, 0))
        gl.store(p_last + C3, gl.sum(b_dbias, 0))


def hopper_scorer_forward(x: Inputs, sizes: Sizes) -> Tensor:
    """As `forward.scorer_forward`."""
    logits = x.k.new_empty(x.k.shape[:3], dtype=torch.float32)
    _launch(x, sizes, stream_blocks(x, sizes, 1), logits=logits)
    return logits


def hopper_scorer_beginnings(x: Inputs, dlogits: Tensor, sizes: Sizes) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """As `forward.scorer_beginnings`."""
    B, T, H, _ = x.k.shape
    *_, C3 = sizes.channels
    streams = stream_blocks(x, sizes, 1)
    z1, z2, dz3 = (x.k.new_empty(B, T, H, C) for C in sizes.channels[1:])
    dlast = x.k.new_empty(streams[2], H, C3 + 1, dtype=torch.float32)
    _launch(x, sizes, streams, dlogits=dlogits, z1=z1, z2=z2, dz3=dz3, dlast=dlast)
    sums = dlast.sum(0)
    return z1, z2, dz3, sums[:, :C3], sums[:, C3]


def _launch(
    x: Inputs, sizes: Sizes, streams: tuple, *, logits=None, dlogits=None, z1=None, z2=None, dz3=None, dlast=None
) -> None:
    """Write the logits, or from their gradient what the layers' gradients begin with."""
    _, T, H, _ = x.k.shape
    (tokens, slots, blocks), (K, C1, C2, C3), (_, FIRST, STEP) = streams, sizes.channels, sizes.taps
    hopper_scorer_kernel[(blocks, H)](
        k=x.k, v=x.v, w1=x.w1, bias1=x.bias1, w2=x.w2, bias2=x.bias2, w3=x.w3, bias3=x.bias3, weight=x.weight,
        bias=x.bias, begin=x.begin, cu_seqlens=x.cu_seqlens, seed=x.seed, logits=logits, dlogits=dlogits, z1=z1, z2=z2,
        dz3=dz3, dlast=dlast, T=T, N=num_sequences(x.k, x.cu_seqlens), slots=slots, tokens=tokens, H=H,
        threshold=x.threshold, K=K, C1=C1, C2=C2, C3=C3, FIRST=FIRST, STEP=STEP, DROPOUT=x.seed is not None,
        GRADIENTS=dlogits is not None, PACKED=x.cu_seqlens is not None, num_warps=4,
    )  # fmt: skip
