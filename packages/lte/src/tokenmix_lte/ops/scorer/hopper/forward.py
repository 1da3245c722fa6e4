"""Logits on Hopper: a program scans 64 streams (`streams.py`) of a head; each step computes a block of every layer.

    step s:   cp.async   k, v block s + NUM_STAGES − 1 → s_x0
              WGMMA      z3 block s − 6 ← s_x2;  z2 block s − 3 ← s_x1;  z1 block s ← s_x0   (independent)
              wait z3 → SiLU, linear map → logits;  wait z2 → SiLU → s_x2;  wait z1 → SiLU → s_x1

A block is numbered by the first input block that it depends on: block s of layer 1 reads input blocks s … s + 2.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, warpgroup_mma_wait

from tokenmix_core.chunking import num_sequences
from tokenmix_core.kernels import cached_launch
from tokenmix_core.kernels.gluon import mma_layout_split_n, row_layout, wait_async_copies
from tokenmix_lte.ops.scorer.hopper.streams import (
    STREAMS,
    Sequences,
    convert_streams,
    copy_tokens,
    copy_weights,
    drop_tokens,
    dropout_scale,
    exists,
    hash_channels,
    issue_convolution,
    locate_streams,
    sigmoid,
    smem_layout,
    store_layer,
    stream_blocks,
)
from tokenmix_lte.ops.scorer.sizes import INPUT_STAGES, Sizes
from tokenmix_lte.ops.scorer.types import Inputs

NUM_STAGES = gl.constexpr(INPUT_STAGES)


@cached_launch
@gluon.jit(do_not_specialize=["T", "N", "slots", "tokens", "threshold"])
def hopper_scorer_kernel(
    k, v, w1, bias1, w2, bias2, w3, bias3, weight, bias, begin, cu_seqlens, seed, logits, dlogits, z1, z2, dz3, dlast,
    T, N, slots, tokens, H, threshold, K: gl.constexpr, C1: gl.constexpr, C2: gl.constexpr, C3: gl.constexpr,
    FIRST: gl.constexpr, STEP: gl.constexpr, DROPOUT: gl.constexpr, GRADIENTS: gl.constexpr,
):  # fmt: skip
    """Compute the same as `forward.scorer_kernel`, by streams; slots have `tokens` tokens (`streams.py`)."""
    W: gl.constexpr = gl.num_warps()
    dtype: gl.constexpr = k.dtype.element_ty
    tile1: gl.constexpr = mma_layout_split_n(C1, W)
    tile2: gl.constexpr = mma_layout_split_n(C2, W)
    tile3: gl.constexpr = mma_layout_split_n(C3, W)
    i_b, i_h = gl.program_id(0), gl.program_id(1)
    # stage i of the inputs: buffer 2 i has the keys of a block, buffer 2 i + 1 its values
    s_x0 = gl.allocate_shared_memory(dtype, [2 * NUM_STAGES, STREAMS, K], smem_layout(K))
    s_x1 = gl.allocate_shared_memory(dtype, [4, STREAMS, C1], smem_layout(C1))
    s_x2 = gl.allocate_shared_memory(dtype, [4, STREAMS, C2], smem_layout(C2))
    s_w1 = gl.allocate_shared_memory(dtype, [6, K, C1], smem_layout(C1))
    s_w2 = gl.allocate_shared_memory(dtype, [3, C1, C2], smem_layout(C2))
    s_w3 = gl.allocate_shared_memory(dtype, [3, C2, C3], smem_layout(C3))
    copy_weights(s_w1, w1, i_h, H, W)
    copy_weights(s_w2, w2, i_h, H, W)
    copy_weights(s_w3, w3, i_h, H, W)
    streams = locate_streams(
        i_b, i_h, slots, tokens, Sequences(T, N, begin, cu_seqlens), H, STEP, W, gl.SliceLayout(1, row_layout(K, W))
    )
    streams1 = convert_streams(streams, gl.SliceLayout(1, tile1))
    streams2 = convert_streams(streams, gl.SliceLayout(1, tile2))
    streams3 = convert_streams(streams, gl.SliceLayout(1, tile3))
    for i in gl.static_range(NUM_STAGES - 1):
        o_t = 3 * FIRST + i * STEP
        copy_tokens(s_x0.index(2 * i), k, streams, o_t, H, K, W)
        copy_tokens(s_x0.index(2 * i + 1), v, streams, o_t, H, K, W)
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
    o_k = gl.arange(0, K, gl.SliceLayout(0, row_layout(K, W)))
    dropout_k = hash_channels(seed, threshold, o_k, 0) if DROPOUT else None
    dropout_v = hash_channels(seed, threshold, o_k + K, 0) if DROPOUT else None
    dropout1 = hash_channels(seed, threshold, o_1, 1) if DROPOUT else None
    dropout2 = hash_channels(seed, threshold, o_2, 2) if DROPOUT else None
    if DROPOUT:
        wait_async_copies(NUM_STAGES - 4)
        for i in gl.static_range(3):
            o_t = 3 * FIRST + i * STEP
            drop_tokens(s_x0.index(2 * i), dropout_k, streams, o_t, H, W)
            drop_tokens(s_x0.index(2 * i + 1), dropout_v, streams, o_t, H, W)
    scale = dropout_scale(threshold, DROPOUT)
    zero1 = gl.zeros([STREAMS, C1], gl.float32, tile1)
    zero2 = gl.zeros([STREAMS, C2], gl.float32, tile2)
    zero3 = gl.zeros([STREAMS, C3], gl.float32, tile3)
    for s in range(tokens // STEP + 6):
        # after this barrier, all warps have finished the MMAs of the previous step and see each other's stores
        wait_async_copies(NUM_STAGES - 5)
        new, o_t = (s + NUM_STAGES - 1) % NUM_STAGES * 2, (s + NUM_STAGES - 1) * STEP + 3 * FIRST
        copy_tokens(s_x0.index(new), k, streams, o_t, H, K, W)
        copy_tokens(s_x0.index(new + 1), v, streams, o_t, H, K, W)
        async_copy.commit_group()
        b_z3 = issue_convolution(s_x2, s_w3, s + 2, zero3)
        b_z2 = issue_convolution(s_x1, s_w2, s + 1, zero2)
        b_z1 = issue_convolution(s_x0, s_w1, s, zero1)
        if DROPOUT:
            new, o_t = (s + 3) % NUM_STAGES * 2, (s + 3) * STEP + 3 * FIRST
            drop_tokens(s_x0.index(new), dropout_k, streams, o_t, H, W)
            drop_tokens(s_x0.index(new + 1), dropout_v, streams, o_t, H, W)

        b_z3 = warpgroup_mma_wait(9, deps=[b_z3]) * scale + b_bias3[None, :]
        b_sigmoid = sigmoid(b_z3)
        b_x3 = b_z3 * b_sigmoid
        o_t = (s - 6) * STEP
        o_row = streams3.row + o_t * H
        m_own = (o_t >= 0) & (o_t < streams3.end)
        if GRADIENTS:
            m_own = m_own & exists(streams3, o_t)
            b_dw += gl.where(m_own[:, None], b_d[:, None] * b_x3, 0.0)
            b_dbias += b_d
            b_dz = b_d[:, None] * b_w[None, :] * b_sigmoid * (1.0 + b_z3 * (1.0 - b_sigmoid))
            gl.store(dz3 + o_row[:, None] * C3 + o_3[None, :], b_dz.to(dtype), mask=m_own[:, None])
            # load dlogits of the next step early
            m_own = exists(streams3, o_t + STEP) & (o_t + STEP >= 0)
            b_d = gl.load(dlogits + (o_row + STEP * H), mask=m_own, other=0.0).to(gl.float32)
        else:
            gl.store(logits + o_row, gl.sum(b_x3 * b_w[None, :], 1) + b_bias, mask=m_own)

        b_z2 = warpgroup_mma_wait(6, deps=[b_z2]) * scale + b_bias2[None, :]
        o_t = (s - 3) * STEP + FIRST
        b_z2 = store_layer(s_x2.index((s + 1) % 4), b_z2, dropout2, streams2, o_t, H, tile2)
        if GRADIENTS:
            m_own = exists(streams2, o_t) & (o_t >= 0) & (o_t < tokens)
            p_z = z2 + (streams2.row + o_t * H)[:, None] * C2 + o_2[None, :]
            gl.store(p_z, b_z2, mask=m_own[:, None])

        b_z1 = warpgroup_mma_wait(0, deps=[b_z1]) * scale + b_bias1[None, :]
        o_t = s * STEP + 2 * FIRST
        b_z1 = store_layer(s_x1.index(s % 4), b_z1, dropout1, streams1, o_t, H, tile1)
        if GRADIENTS:
            m_own = exists(streams1, o_t) & (o_t >= 0) & (o_t < tokens)
            p_z = z1 + (streams1.row + o_t * H)[:, None] * C1 + o_1[None, :]
            gl.store(p_z, b_z1, mask=m_own[:, None])
    wait_async_copies(0)
    if GRADIENTS:
        p_last = dlast + (i_b.to(gl.int64) * H + i_h) * (C3 + 1)
        gl.store(p_last + o_3, gl.sum(b_dw, 0))
        gl.store(p_last + C3, gl.sum(b_dbias, 0))


def hopper_scorer_forward(x: Inputs, sizes: Sizes) -> Tensor:
    """Compute the same as `forward.scorer_forward`."""
    logits = x.k.new_empty(x.k.shape[:3], dtype=torch.float32)
    _launch(x, sizes, stream_blocks(x, sizes, 1), logits=logits)
    return logits


def hopper_scorer_recompute(x: Inputs, dlogits: Tensor, sizes: Sizes) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute the same as `forward.scorer_recompute`."""
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
    """Launch the kernel: write the logits or, if `dlogits` are given, the results of `scorer_recompute`."""
    _, T, H, _ = x.k.shape
    (tokens, slots, blocks), (K, C1, C2, C3), (_, FIRST, STEP) = streams, sizes.channels, sizes.taps
    hopper_scorer_kernel[(blocks, H)](
        k=x.k, v=x.v, w1=x.w1, bias1=x.bias1, w2=x.w2, bias2=x.bias2, w3=x.w3, bias3=x.bias3, weight=x.weight,
        bias=x.bias, begin=x.begin, cu_seqlens=x.cu_seqlens, seed=x.seed, logits=logits, dlogits=dlogits, z1=z1, z2=z2,
        dz3=dz3, dlast=dlast, T=T, N=num_sequences(x.k, x.cu_seqlens), slots=slots, tokens=tokens, H=H,
        threshold=x.threshold, K=K, C1=C1, C2=C2, C3=C3, FIRST=FIRST, STEP=STEP, DROPOUT=x.seed is not None,
        GRADIENTS=dlogits is not None, num_warps=4,
    )  # fmt: skip
