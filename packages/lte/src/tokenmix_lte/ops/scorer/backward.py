"""Triton kernel of the gradients of one layer's inputs and weights; programs store partial sums of weight gradients."""

# Triton does not support starred expressions in tuples
# ruff: noqa: RUF005

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmix_core.chunking import cdiv, chunk_slots, num_sequences
from tokenmix_core.kernels import FLOAT32_DOT, cached_launch, sm_count
from tokenmix_lte.ops.scorer.forward import load_tap
from tokenmix_lte.ops.scorer.sizes import Sizes
from tokenmix_lte.ops.scorer.tokens import apply_dropout, dropout_scale, load_channels, locate_tokens, store_channels
from tokenmix_lte.ops.scorer.types import Inputs

_PROGRAMS_PER_SM = 2


@cached_launch
@triton.jit(do_not_specialize=["T", "N", "slots", "tiles"])
def scorer_layer_backward_kernel(
    x, other, dz, w, begin, cu_seqlens, seed, dx, dother, dw, dbias, T, N, slots, tiles, H, threshold, C, CO,
    BT: tl.constexpr, BC: tl.constexpr, BO: tl.constexpr, LAYER: tl.constexpr, TAPS: tl.constexpr,
    FIRST: tl.constexpr, STEP: tl.constexpr, DROPOUT: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of C input channels of a layer and of their weights from dz, the gradient of z; the
    weights' gradients are sums over the program's `tiles` tiles of BT tokens.

    z is the output of the layer before SiLU. In layer 0, the programs of part 0 have keys as x, and those of part 1
    have values as `other`. All other layers have no `other`: x is z of the preceding layer, whose gradient is stored.
    The programs of part 0 also sum the gradients of the biases. FIRST is the offset of the convolution's first tap.
    """
    i_program, i_h, i_part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    # first input channel of this program
    i_in = i_part * C
    scale = dropout_scale(threshold, DROPOUT)
    CI = tl.num_programs(2) * C
    if other is not None:  # noqa: SIM102
        if i_part == 1:
            x = other
            dx = dother
    b_w = ()
    b_dw = ()
    for i in tl.static_range(TAPS):
        b_w = b_w + (load_tap(w, i, i_h, H, CI, CO, i_in, C, BC, BO),)
        b_dw = b_dw + (tl.zeros([BC, BO], tl.float32),)
    b_dbias = tl.zeros([BO], tl.float32)
    for i_tile in range(tiles):
        i_c = i_program * tiles + i_tile
        i_row, start, end, first = locate_tokens(i_c, slots, T, BT, N, begin, cu_seqlens, PACKED)
        o_t = first + tl.arange(0, BT)
        m_t = (o_t >= start) & (o_t < end)
        o_row = (i_row + o_t) * H + i_h
        b_x = load_channels(x, o_row, m_t, C, BC)
        b_z = b_x.to(tl.float32)
        b_sigmoid = tl.sigmoid(b_z)
        if LAYER > 0:
            # z of a dropped element has the value `sizes.DROPPED`
            b_x = (b_z * b_sigmoid * scale).to(b_x.dtype)
        else:
            b_x = apply_dropout(b_x, seed, threshold, o_row, i_part * ((C + 1) // 2), LAYER, DROPOUT)
        b_dx = tl.zeros([BT, BC], tl.float32)
        b_sums = ()
        for i in tl.static_range(TAPS):
            # the output token that reads token o_t through this tap
            o_s = o_t - (FIRST + i * STEP)
            m_s = m_t & (o_s >= start) & (o_s < end)
            b_dz = load_channels(dz, (i_row + o_s) * H + i_h, m_s, CO, BO)
            b_dx = tl.dot(b_dz, tl.trans(b_w[i]), b_dx, input_precision=FLOAT32_DOT)
            b_sums = b_sums + (tl.dot(tl.trans(b_x), b_dz, b_dw[i], input_precision=FLOAT32_DOT),)
            if FIRST + i * STEP == 0:
                b_dbias += tl.sum(b_dz.to(tl.float32), 0)
        b_dw = b_sums
        if LAYER > 0:
            b_dx *= b_sigmoid * (1.0 + b_z * (1.0 - b_sigmoid)) * scale
        else:
            b_dx = apply_dropout(b_dx, seed, threshold, o_row, i_part * ((C + 1) // 2), LAYER, DROPOUT)
        m_t = (o_t >= 0) & (o_t < tl.minimum(first + BT, end))
        store_channels(dx, b_dx, o_row, m_t, C, BC)
    o_i, o_o = tl.arange(0, BC), tl.arange(0, BO)
    m_w = (o_i < C)[:, None] & (o_o < CO)[None, :]
    for i in tl.static_range(TAPS):
        p_w = dw + (((i_program.to(tl.int64) * TAPS + i) * H + i_h) * CI + i_in) * CO
        tl.store(p_w + o_i[:, None] * CO + o_o[None, :], b_dw[i], mask=m_w)
    if i_part == 0:
        tl.store(dbias + (i_program.to(tl.int64) * H + i_h) * CO + o_o, b_dbias, mask=o_o < CO)


def scorer_layer_backward(
    x: Inputs, sizes: Sizes, *, layer: int, inputs: tuple[Tensor, ...], dz: Tensor, w: Tensor
) -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
    """Return the gradients of a layer's inputs, of its weights `[H, out, in, taps]`, and of its biases `[H, out]`.

    `inputs` are k and v, or z of the preceding layer; `dz` is the gradient of this layer's z, to which SiLU is applied.
    The gradients of weights and biases are float32.
    """
    B, T, H, C = inputs[0].shape
    CO, tile = dz.shape[-1], sizes.layer
    grads = tuple(torch.empty_like(t) for t in inputs)
    # only the first layer has two inputs
    (of, other), (dx, dother) = ((*tensors, None)[:2] for tensors in (inputs, grads))
    slots = chunk_slots(B, T, tile.BT, x.cu_seqlens)
    tiles = cdiv(slots * H * len(inputs), _PROGRAMS_PER_SM * sm_count(dz.device))
    programs, (TAPS, FIRST, STEP) = cdiv(slots, tiles), sizes.taps
    dw = dz.new_empty(programs, TAPS, H, len(inputs) * C, CO, dtype=torch.float32)
    dbias = dz.new_empty(programs, H, CO, dtype=torch.float32)
    scorer_layer_backward_kernel[(programs, H, len(inputs))](
        x=of, other=other, dz=dz, w=w, begin=x.begin, cu_seqlens=x.cu_seqlens, seed=x.seed, dx=dx, dother=dother, dw=dw,
        dbias=dbias, T=T, N=num_sequences(dz, x.cu_seqlens), slots=slots, tiles=tiles, H=H, threshold=x.threshold, C=C,
        CO=CO, BT=tile.BT, BC=sizes.blocks[layer], BO=sizes.blocks[layer + 1], LAYER=layer, TAPS=TAPS, FIRST=FIRST,
        STEP=STEP, DROPOUT=x.seed is not None, PACKED=x.cu_seqlens is not None, num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )  # fmt: skip
    return grads, dw.sum(0).permute(1, 3, 2, 0).contiguous(), dbias.sum(0)
