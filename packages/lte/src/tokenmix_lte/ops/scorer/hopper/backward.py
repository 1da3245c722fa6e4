"""Gradients of one layer on Hopper: a program scans 64 streams (`streams.py`) and sums weight gradients in registers.

    step s:   cp.async   dz block s + DZ_STAGES − 1 → s_dz;  layer 0: x block s + X_STAGES − 1 → s_x
              WGMMA      dx block s = Σ_tap dz block s + 2 − tap · Wᵀ;   dW_tap += x block sᵀ · dz block s + 2 − tap
              layers > 0: load z of the next block, recompute SiLU and its derivative from z

Blocks s … s + 2 of dz are gradients of the outputs z that read block s of the inputs.
"""

# Triton does not support starred expressions in tuples
# ruff: noqa: RUF005

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tokenmix_core.chunking import num_sequences
from tokenmix_core.kernels import cached_launch
from tokenmix_core.kernels.gluon import async_load, barrier, mma_layout_split_n, row_layout, wait_async_copies
from tokenmix_lte.ops.scorer.hopper.streams import (
    STREAMS,
    Sequences,
    convert_streams,
    copy_tokens,
    drop_tokens,
    dropout_scale,
    exists,
    hash_channels,
    locate_streams,
    sigmoid,
    smem_layout,
    stream_blocks,
    where_kept,
)
from tokenmix_lte.ops.scorer.sizes import Sizes
from tokenmix_lte.ops.scorer.types import Inputs

# columns of all tiles, even if a layer has fewer channels: assemblers before CUDA 12.9 produce wrong code for narrower
# tiles that are read both directly and transposed
_WIDTH = gl.constexpr(64)
# pipeline stages in shared memory. dz: three are read and two are being copied. Keys or values: one is read after
# dropout is applied to it, one is complete, and two are being copied
DZ_STAGES = gl.constexpr(5)
X_STAGES = gl.constexpr(4)
# number of programs that an SM runs at a time
_PROGRAMS_PER_SM = 2


@gluon.jit
def load_layer(z, streams, o_t, H, C: gl.constexpr, layout: gl.constexpr):
    """Load z of a layer, `[STREAMS, _WIDTH]`, at the token o_t after each stream's first own token."""
    o_c = gl.arange(0, _WIDTH, gl.SliceLayout(0, layout))
    p_z = z + (streams.row + o_t * H)[:, None] * C + o_c[None, :]
    return gl.load(p_z, mask=exists(streams, o_t)[:, None] & (o_c < C)[None, :], other=0.0)


@gluon.jit
def dz_block(s_dz, s, tap, CO: gl.constexpr):
    """Return the block of dz whose outputs read block s of the inputs through this tap."""
    return s_dz.index((s + 2 - tap) % DZ_STAGES).slice(0, CO, 1)


@cached_launch
@gluon.jit(do_not_specialize=["T", "N", "slots", "tokens", "threshold"])
def hopper_layer_backward_kernel(
    x, other, dz, w, begin, cu_seqlens, seed, dx, dother, dw, dbias, T, N, slots, tokens, H, threshold,
    C: gl.constexpr, CO: gl.constexpr, LAYER: gl.constexpr, FIRST: gl.constexpr, STEP: gl.constexpr,
    DROPOUT: gl.constexpr,
):  # fmt: skip
    """Compute the results of `backward.scorer_layer_backward_kernel` by streams; slots have `tokens` tokens."""
    W: gl.constexpr = gl.num_warps()
    dtype: gl.constexpr = x.dtype.element_ty
    tile: gl.constexpr = mma_layout_split_n(_WIDTH, W)
    row: gl.constexpr = row_layout(_WIDTH, W)
    i_b, i_h, i_part = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    i_in = i_part * C
    CI = gl.num_programs(2) * C
    if other is not None:
        x = gl.where(i_part == 1, other, x)
        dx = gl.where(i_part == 1, dother, dx)
    s_w = gl.allocate_shared_memory(dtype, [3, _WIDTH, _WIDTH], smem_layout(_WIDTH))
    s_dz = gl.allocate_shared_memory(dtype, [DZ_STAGES, STREAMS, _WIDTH], smem_layout(_WIDTH))
    INPUTS: gl.constexpr = 1 if LAYER > 0 else X_STAGES
    s_x = gl.allocate_shared_memory(dtype, [INPUTS, STREAMS, _WIDTH], smem_layout(_WIDTH))
    o_i = gl.arange(0, _WIDTH, gl.SliceLayout(1, row))
    o_o = gl.arange(0, _WIDTH, gl.SliceLayout(0, row))
    for i in gl.static_range(3):
        p_w = w + ((i * H + i_h) * CI + i_in + o_i[:, None]) * CO + o_o[None, :]
        async_load(s_w.index(i), p_w, mask=(o_i < C)[:, None] & (o_o < CO)[None, :])
    streams = locate_streams(
        i_b, i_h, slots, tokens, Sequences(T, N, begin, cu_seqlens), H, STEP, W, gl.SliceLayout(1, row)
    )
    streams_t = convert_streams(streams, gl.SliceLayout(1, tile))
    for i in gl.static_range(DZ_STAGES - 1):
        copy_tokens(s_dz.index(i), dz, streams, (i - 2) * STEP - FIRST, H, CO, W)
        if LAYER == 0 and i < X_STAGES - 1:
            copy_tokens(s_x.index(i), x, streams, i * STEP, H, C, W)
        async_copy.commit_group()
    zero = gl.zeros([STREAMS, _WIDTH], gl.float32, tile)
    sums: gl.constexpr = mma_layout_split_n(CO, W)
    zero_w = gl.zeros([_WIDTH, CO], gl.float32, sums)
    b_dw = (zero_w, zero_w, zero_w)
    b_dbias = zero_w
    scale = dropout_scale(threshold, DROPOUT)
    if LAYER > 0:
        b_z = load_layer(x, streams_t, 0, H, C, tile)
    dropout = hash_channels(seed, threshold, o_o + i_in, 0) if DROPOUT and LAYER == 0 else None
    for s in range(tokens // STEP):
        # after this barrier, all warps have finished the MMAs of the previous step and see each other's stores
        wait_async_copies(1)
        o_t = s * STEP
        new = s + DZ_STAGES - 1
        copy_tokens(s_dz.index(new % DZ_STAGES), dz, streams, (new - 2) * STEP - FIRST, H, CO, W)
        if LAYER == 0:
            new = s + X_STAGES - 1
            copy_tokens(s_x.index(new % X_STAGES), x, streams, new * STEP, H, C, W)
        async_copy.commit_group()
        b_dx = zero
        for tap in gl.static_range(3):
            s_wt = s_w.index(tap).slice(0, CO, 1).permute((1, 0))
            b_dx = warpgroup_mma(dz_block(s_dz, s, tap, CO), s_wt, b_dx, use_acc=tap > 0, is_async=True)
        if LAYER > 0:
            s_x_block = s_x.index(0)
            b_z = b_z.to(gl.float32)
            b_sigmoid = sigmoid(b_z)
            b_x = b_z * b_sigmoid
            b_slope = b_sigmoid * (1.0 + b_z * (1.0 - b_sigmoid))
            # a missing token has z = 0 and therefore x = 0; a dropped element has z = DROPPED, x = 0 and slope 0
            s_x_block.store(b_x.to(dtype))
            b_slope *= scale
            b_z = load_layer(x, streams_t, o_t + STEP, H, C, tile)
            fence_async_shared()
            barrier()
        else:
            s_x_block = s_x.index(s % X_STAGES)
            if DROPOUT:
                b_mask = drop_tokens(s_x_block, dropout, streams, o_t, H, W)
                fence_async_shared()
                barrier()
        b_sums = ()
        for tap in gl.static_range(3):
            s_dz_block = dz_block(s_dz, s, tap, CO)
            b_sums = b_sums + (warpgroup_mma(s_x_block.permute((1, 0)), s_dz_block, b_dw[tap], is_async=True),)
        # dz of each token is read once, through the tap at offset 0, and summed for the gradient of the bias
        b_dbias += dz_block(s_dz, s, -FIRST // STEP, CO).load(sums).to(gl.float32)
        b_dx = warpgroup_mma_wait(3, deps=[b_dx])
        b_dx *= b_slope if LAYER > 0 else scale
        b_dx = gl.convert_layout(b_dx.to(dtype), row)
        o_row = streams.row + o_t * H
        zero_dx = gl.zeros(b_dx.shape, dtype, row)
        b_dx = gl.where(exists(streams, o_t)[:, None], b_dx, zero_dx)
        if LAYER == 0 and DROPOUT:
            b_dx = where_kept(b_mask, b_dx, zero_dx)
        m_own = o_t < streams.end
        gl.store(dx + o_row[:, None] * C + o_o[None, :], b_dx, mask=m_own[:, None] & (o_o < C)[None, :])
        b_dw = warpgroup_mma_wait(0, deps=b_sums)
    wait_async_copies(0)
    o_i = gl.arange(0, _WIDTH, gl.SliceLayout(1, sums))
    o_c = gl.arange(0, CO, gl.SliceLayout(0, sums))
    for tap in gl.static_range(3):
        p_w = dw + (((i_b.to(gl.int64) * 3 + tap) * H + i_h) * CI + i_in + o_i[:, None]) * CO + o_c[None, :]
        gl.store(p_w, b_dw[tap] * scale, mask=(o_i < C)[:, None])
    if i_part == 0:
        gl.store(dbias + (i_b.to(gl.int64) * H + i_h) * CO + o_c, gl.sum(b_dbias, 0))


def hopper_layer_backward(
    x: Inputs, sizes: Sizes, *, layer: int, inputs: tuple[Tensor, ...], dz: Tensor, w: Tensor
) -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
    """Compute the same as `backward.scorer_layer_backward`."""
    _, T, H, C = inputs[0].shape
    CO, (_, FIRST, STEP) = dz.shape[-1], sizes.taps
    grads = tuple(torch.empty_like(t) for t in inputs)
    # only the first layer has two inputs
    (of, other), (dx, dother) = ((*tensors, None)[:2] for tensors in (inputs, grads))
    tokens, slots, blocks = stream_blocks(x, sizes, _PROGRAMS_PER_SM / len(inputs))
    dw = dz.new_empty(blocks, 3, H, len(inputs) * C, CO, dtype=torch.float32)
    dbias = dz.new_empty(blocks, H, CO, dtype=torch.float32)
    hopper_layer_backward_kernel[(blocks, H, len(inputs))](
        x=of, other=other, dz=dz, w=w, begin=x.begin, cu_seqlens=x.cu_seqlens, seed=x.seed, dx=dx, dother=dother, dw=dw,
        dbias=dbias, T=T, N=num_sequences(dz, x.cu_seqlens), slots=slots, tokens=tokens, H=H, threshold=x.threshold,
        C=C, CO=CO, LAYER=layer, FIRST=FIRST, STEP=STEP, DROPOUT=x.seed is not None,
        num_warps=4,
    )  # fmt: skip
    return grads, dw.sum(0).permute(1, 3, 2, 0).contiguous(), dbias.sum(0)
