"""One projection a token, by the weights of its mode: a grouped product over the tokens in order of their modes."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from tokenmix_core.nn import is_plain_linear, moved


class TokenOrder(NamedTuple):
    """N tokens in order of their modes, linear ones first.

    Attributes:
        order: `[N]`, the token at each place.
        places: `[N]`, the place of each token.
        ends: `[2]` int32, where each mode's tokens end.
    """

    order: Int[Tensor, "N"]
    places: Int[Tensor, "N"]
    ends: Int[Tensor, "2"]


def token_order(attention: Bool[Tensor, "B T"]) -> TokenOrder:
    """The order of tokens of which `attention` is True for those in attention mode; nothing waits for the device."""
    attends = attention.flatten()
    before = attends.cumsum(0)
    tokens = torch.arange(len(attends), device=attends.device)
    linear = len(attends) - before[-1]
    places = torch.where(attends, linear + before - 1, tokens - before)
    order = torch.empty_like(places).scatter_(0, places, tokens)
    return TokenOrder(order, places, torch.stack([linear, torch.full_like(linear, len(attends))]).int())


def can_group(x: Tensor, *layers: nn.Module | None) -> bool:
    """Tell whether the device multiplies groups of sizes unknown to the host, and the layers are plain matrices."""
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x.dtype
    if (
        not x.is_cuda
        or dtype != torch.bfloat16
        or not all(layer is not None and is_plain_linear(layer) for layer in layers)
    ):
        return False
    # elsewhere torch takes the sizes to the host
    return torch.cuda.get_device_capability(x.device)[0] in (9, 10)


def project_in_order(
    x: Float[Tensor, "B T D"], linear: Float[Tensor, "E D"], attention: Float[Tensor, "E D"], order: TokenOrder
) -> Float[Tensor, "N E"]:
    """y = W x with the weights of each token's mode, each token multiplied once, in order of their modes."""
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    weights = torch.stack([linear, attention]).to(x.dtype).transpose(1, 2)
    rows = moved(x.flatten(0, 1), order.order, order.places)
    return F.grouped_mm(rows, weights, offs=order.ends)


def project_by_mode(
    x: Float[Tensor, "B T D"], linear: Float[Tensor, "E D"], attention: Float[Tensor, "E D"], order: TokenOrder
) -> Float[Tensor, "B T E"]:
    """The same, each token in its own place."""
    y = project_in_order(x, linear, attention, order)
    return moved(y, order.places, order.order).unflatten(0, x.shape[:2])
