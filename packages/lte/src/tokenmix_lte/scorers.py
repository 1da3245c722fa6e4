"""Scorers of keys: convolutions over neighbouring tokens or, as an ablation, an MLP of each key and its value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from tokenmix_core import undefined
from tokenmix_core.nn import at_least_float32
from tokenmix_core.ops import Impl
from tokenmix_lte.ops import retention_logits
from tokenmix_lte.ops.scorer.sizes import channels_of_layers

Scorers = Literal["cnn", "causal", "mlp", "none", "uniform"]
# scorers without parameters
FIXED = ("none", "uniform")
_LAYERS = 3


class Scorer(nn.Module):
    """Computes retention logits `[B, T, H]` from values and unrotated keys, with separate weights for each key head.

    Attributes:
        behind, ahead: number of tokens before and after a token on which its logit depends.
        flops: operations per token, a multiplication and an addition for each weight.
    """

    behind = ahead = 0

    @property
    def flops(self) -> float:
        """Forward floating-point operations per token: two for each weight."""
        return 2.0 * sum(p.numel() for p in self.parameters())

    def forward(
        self,
        k: Float[Tensor, "B T H K"],
        v: Float[Tensor, "B T H V"],
        *,
        begin: Int[Tensor, "B"] | None = None,
        cu_seqlens: Int[Tensor, "N_plus_1"] | None = None,
        own: Callable[[Tensor], Tensor] = lambda x: x,
    ) -> Float[Tensor, "B T H"]:
        """Return the logits; the arguments are those of `retention_logits`.

        `own` selects, along a parameter's first dimension, the heads that k and v hold.
        """
        signature = "forward(k, v, *, begin, cu_seqlens, own)"
        raise undefined(self, signature, "which returns a logit for every token and head")


class _Parameters(nn.ParameterList):
    """A parameter list that is called to get its parameters, so that hooks run at the call (e.g. for offloading)."""

    # call it like a module, because nn.ParameterList raises an error when called
    __call__ = nn.Module.__call__

    def forward(self) -> list[Tensor]:
        return list(self)


class ConvScorer(Scorer):
    """Three convolutions with dilation 2 and SiLU, each with half the channels of its input, then a linear map.

    Args:
        heads: key heads H.
        channels: number of channels of a head's key and value together, a multiple of 8.
        dropout: dropout of the inputs of each convolution in training.
        causal: whether to read the 12 tokens before a token instead of 6 on either side.
        impl: implementation of `retention_logits`.
    """

    def __init__(self, heads: int, channels: int, *, dropout: float, causal: bool, impl: Impl | None = None):
        super().__init__()
        self.impl: Impl | None = impl
        self.offsets = (-4, -2, 0) if causal else (-2, 0, 2)
        self.behind, self.ahead = -_LAYERS * self.offsets[0], _LAYERS * self.offsets[-1]
        # a Dropout module, so that libraries that disable dropout can find it
        self.dropout = nn.Dropout(dropout)
        sizes = channels_of_layers(channels, _LAYERS)
        self.kernels = _Parameters(
            torch.empty(heads, sizes[i + 1], sizes[i], len(self.offsets)) for i in range(_LAYERS)
        )
        self.biases = _Parameters(torch.empty(heads, sizes[i + 1]) for i in range(_LAYERS))
        self.weight = nn.Parameter(torch.empty(heads, sizes[-1]))
        self.bias = nn.Parameter(torch.empty(heads))
        self.init_weights_()

    def init_weights_(self) -> None:
        """Initialise the weights such that nearly every key is retained."""
        for kernel, bias in zip(self.kernels, self.biases, strict=True):
            fan_in = kernel.shape[2] * kernel.shape[3]
            nn.init.normal_(kernel, 0.0, (2 / fan_in) ** 0.5)
            nn.init.uniform_(bias, -(fan_in**-0.5), fan_in**-0.5)
        _init_last_(self.weight, self.bias)

    def forward(self, k, v, *, begin=None, cu_seqlens=None, own=lambda x: x):
        return retention_logits(
            k,
            v,
            list(zip(map(own, self.kernels()), map(own, self.biases()), strict=True)),
            own(self.weight),
            own(self.bias),
            offsets=self.offsets,
            begin=begin,
            cu_seqlens=cu_seqlens,
            dropout=self.dropout.p if self.training else 0.0,
            impl=self.impl,
        )


class MlpScorer(Scorer):
    """An MLP of each token's key and value (LTE-MLP): a layer with half as many outputs as inputs, SiLU, a linear map.

    Args:
        heads: key heads H.
        channels: number of channels of a head's key and value together.
        dropout: dropout of the hidden layer in training.
    """

    def __init__(self, heads: int, channels: int, *, dropout: float):
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.kernel = nn.Parameter(torch.empty(heads, channels // 2, channels))
        self.shift = nn.Parameter(torch.empty(heads, channels // 2))
        self.weight = nn.Parameter(torch.empty(heads, channels // 2))
        self.bias = nn.Parameter(torch.empty(heads))
        self.init_weights_()

    def init_weights_(self) -> None:
        """Initialise the weights such that nearly every key is retained."""
        fan_in = self.kernel.shape[2]
        nn.init.normal_(self.kernel, 0.0, (2 / fan_in) ** 0.5)
        nn.init.uniform_(self.shift, -(fan_in**-0.5), fan_in**-0.5)
        _init_last_(self.weight, self.bias)

    def forward(self, k, v, *, begin=None, cu_seqlens=None, own=lambda x: x):
        x = at_least_float32(torch.cat((k, v), -1))
        kernel, shift, weight, bias = (own(p).to(x.dtype) for p in (self.kernel, self.shift, self.weight, self.bias))
        with torch.autocast(x.device.type, enabled=False):
            hidden = torch.einsum("bthc,hdc->bthd", x, kernel) + shift
            return torch.einsum("bthd,hd->bth", self.dropout(F.silu(hidden)), weight) + bias


def make_scorer(kind: Scorers, heads: int, channels: int, dropout: float, impl: Impl | None) -> Scorer | None:
    """Return a scorer of this kind; None for "none" and "uniform", which have no parameters."""
    if kind in FIXED:
        return None
    if kind == "mlp":
        return MlpScorer(heads, channels, dropout=dropout)
    return ConvScorer(heads, channels, dropout=dropout, causal=kind == "causal", impl=impl)


def _init_last_(weight: Tensor, bias: Tensor) -> None:
    nn.init.normal_(weight, 0.0, (2 / weight.shape[1]) ** 0.5)
    nn.init.constant_(bias, 0.5)
