"""Projection of each token's query by the weights of the token's mode: a grouped GEMM over tokens sorted by mode."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from tokenmix_core.nn import is_plain_linear, moved


class TokenOrder(NamedTuple):
    """N tokens sorted by mode, those in linear mode first.

    Attributes:
        tokens: `[N]`, the token in each sorted row.
        rows: `[N]`, the sorted row of each token.
        ends: `[2]` int32, the ends of the rows in linear mode and of those in attention mode.
    """

    tokens: Int[Tensor, "N"]
    rows: Int[Tensor, "N"]
    ends: Int[Tensor, "2"]


def token_order(attention: Bool[Tensor, "B T"]) -> TokenOrder:
    """Sort the tokens by mode, without waiting for the device; `attention` is True for tokens in attention mode."""
    attends = attention.flatten()
    before = attends.cumsum(0)
    tokens = torch.arange(len(attends), device=attends.device)
    linear = len(attends) - before[-1]
    rows = torch.where(attends, linear + before - 1, tokens - before)
    by_row = torch.empty_like(rows).scatter_(0, rows, tokens)
    return TokenOrder(by_row, rows, torch.stack([linear, torch.full_like(linear, len(attends))]).int())


def can_group(x: Tensor, *layers: nn.Module | None) -> bool:
    """True if torch's grouped GEMM reads group sizes on this device (bfloat16 on sm_90 or sm_100), and layers are
    plain.
    """
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x.dtype
    if (
        not x.is_cuda
        or dtype != torch.bfloat16
        or not all(layer is not None and is_plain_linear(layer) for layer in layers)
    ):
        return False
    # on all other devices, torch copies the group sizes to the host
    return torch.cuda.get_device_capability(x.device)[0] in (9, 10)


def project_in_order(
    x: Float[Tensor, "B T D"], linear: Float[Tensor, "E D"], attention: Float[Tensor, "E D"], order: TokenOrder
) -> Float[Tensor, "N E"]:
    """Return W x for each token x, in the sorted rows of `order`.

    W is `linear` or `attention`, by the mode of the token.
    """
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    weights = torch.stack([linear, attention]).to(x.dtype).transpose(1, 2)
    rows = moved(x.flatten(0, 1), order.tokens, order.rows)
    return F.grouped_mm(rows, weights, offs=order.ends)


def project_by_mode(
    x: Float[Tensor, "B T D"], linear: Float[Tensor, "E D"], attention: Float[Tensor, "E D"], order: TokenOrder
) -> Float[Tensor, "B T E"]:
    """Return W x for each token x, where W is `linear` or `attention` by the token's mode, in the tokens' order."""
    y = project_in_order(x, linear, attention, order)
    return moved(y, order.rows, order.tokens).unflatten(0, x.shape[:2])
