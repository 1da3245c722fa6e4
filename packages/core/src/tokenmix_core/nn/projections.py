"""Linear layers of one input: one launch for all of them where it is one token of few sequences."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from tokenmix_core.launch.replay import is_plain, is_real
from tokenmix_core.ops import linears
from tokenmix_core.ops.projections.sizes import MOST_ROWS


def projected(x: Float[Tensor, "*tokens D"], *layers: nn.Module) -> tuple[Tensor, ...]:
    """The outputs of two to six linear layers: by `linears` without gradients and for few tokens, else each layer's."""
    # numbers of tokens are not asked for where torch traces: a graph would be made for either answer
    few = is_plain(x) and not torch.is_grad_enabled() and x.numel() <= MOST_ROWS * x.shape[-1]
    if not few or not all(_takes(layer, x) for layer in layers):
        return tuple(layer(x) for layer in layers)
    found = linears(x.reshape(-1, x.shape[-1]), [layer.weight for layer in layers])  # type: ignore[misc]
    return tuple(y.view(*x.shape[:-1], y.shape[-1]) for y in found)


def _takes(layer: nn.Module, x: Tensor) -> bool:
    """Tell whether a layer is its weight's product with x alone, to a kernel's eye."""
    # what autocast makes of the layer is its own, and so is what a weight of another class, quantised or sharded, holds
    if torch.is_autocast_enabled(x.device.type) or not is_plain_linear(layer):
        return False
    return is_real(layer.weight) and layer.weight.dtype == x.dtype  # type: ignore[arg-type, union-attr]


def is_plain_linear(layer: nn.Module) -> bool:
    """Tell whether a layer is torch's own without a bias, and nobody has changed or watches its forward pass.

    Adapters, quantisation and hooks do: their layers have to be called.
    """
    watched = layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks
    return type(layer) is nn.Linear and layer.bias is None and not watched and "forward" not in layer.__dict__
