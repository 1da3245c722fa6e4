"""The short causal convolution in eager PyTorch, for any device and dtype."""

from __future__ import annotations

import itertools

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tokenmix_core.ops.padding import drops_padding
from tokenmix_core.ops.types import ScanOutput


@drops_padding("x")
def short_conv_reference(
    x: Float[Tensor, "B T D"],
    weight: Float[Tensor, "D W"],
    bias: Float[Tensor, "D"] | None = None,
    *,
    activation: str | None = None,
    initial_state: Float[Tensor, "N D W_minus_1"] | None = None,
    cu_seqlens: Int[Tensor, "N_plus_1"] | None = None,
) -> ScanOutput:
    """Compute `short_conv` as a sum of W shifted terms, in float32 (float64 for float64 inputs)."""
    if cu_seqlens is None:
        return _one_row(x, weight, bias, activation, initial_state)
    boundaries = cu_seqlens.tolist()
    parts = [
        _one_row(x[:, begin:end], weight, bias, activation, None if initial_state is None else initial_state[n : n + 1])
        for n, (begin, end) in enumerate(itertools.pairwise(boundaries))
    ]
    return ScanOutput(torch.cat([part.o for part in parts], 1), torch.cat([part.final_state for part in parts]))


def _one_row(x, weight, bias, activation, initial_state) -> ScanOutput:
    T, width = x.shape[1], weight.shape[1]
    if initial_state is None:
        initial_state = x.new_zeros(x.shape[0], x.shape[2], width - 1)
    inputs = torch.cat([initial_state.mT, x], 1)
    dtype = torch.promote_types(x.dtype, torch.float32)
    # the last column of the weight multiplies the newest input
    o = sum(inputs[:, w : w + T].to(dtype) * weight[:, w].to(dtype) for w in range(width))
    if bias is not None:
        o = o + bias.to(dtype)
    if activation == "silu":
        o = torch.nn.functional.silu(o)
    return ScanOutput(o.to(x.dtype), inputs[:, T:].mT.contiguous())


def short_conv_step_reference(
    weight: Float[Tensor, "D W"],
    bias: Float[Tensor, "D"] | None,
    activation: str | None,
    x: Float[Tensor, "B D"],
    state: Float[Tensor, "B D W_minus_1"],
) -> Float[Tensor, "B D"]:
    """Return the output of one token and update `state`."""
    o, new_state = _one_row(x.unsqueeze(1), weight, bias, activation, state)
    state.copy_(new_state)
    return o.squeeze(1)
