"""The module of the short causal convolution."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from tokenmix_core.nn.init import init_short_conv_
from tokenmix_core.nn.plain import is_plain
from tokenmix_core.nn.state import TensorState
from tokenmix_core.ops import short_conv_prefill, short_conv_step, short_conv_steps, short_convs_prefill
from tokenmix_core.ops.types import Impl
from tokenmix_core.parallel import short_conv, short_convs


class ShortConv(nn.Module):
    """Causal depthwise convolution along time with an optional SiLU: `weight [D, W]`, `bias [D]` or None.

    Args:
        channels: D.
        width: W, 2 to 8.
        bias: whether a bias is added.
        activation: None or "silu".
        impl: implementation of the operation, as for `tokenmix_core.ops.short_conv`.

    Raises:
        ValueError: a width outside 2 to 8.
    """

    def __init__(
        self,
        channels: int,
        width: int = 4,
        *,
        bias: bool = False,
        activation: Literal["silu"] | None = "silu",
        impl: Impl | None = None,
    ):
        super().__init__()
        if not 2 <= width <= 8:
            raise ValueError(f"ShortConv: the width must lie from 2 to 8, got {width}")
        self.weight = nn.Parameter(torch.empty(channels, width))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None
        self.activation: Literal["silu"] | None = activation
        self.impl: Impl | None = impl
        self.init_weights_()

    def init_weights_(self) -> None:
        init_short_conv_(self.weight, self.bias)

    def make_state(self) -> TensorState:
        """Return the state: the last W − 1 inputs of each sequence, oldest first."""
        channels, width = self.weight.shape
        return TensorState(channels, width - 1)

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        *,
        state: TensorState | None = None,
        cu_seqlens: Int[Tensor, "N_plus_1"] | None = None,
        step: bool = False,
    ) -> Float[Tensor, "B T D"]:
        """Return the convolution of x.

        A `state` holds the preceding inputs and is updated. Slots of a pool (`state.slots`) are overwritten in place,
        and so is any state if `step` (T = 1).
        """
        if step and state is not None:
            y = short_conv_step(
                x.squeeze(1),
                self.weight,
                self.bias,
                state.get(x.shape[0], x),
                slots=state.slots,
                activation=self.activation,
                impl=self.impl,
            )
            return y.unsqueeze(1)
        if state is not None and state.slots is not None:
            return short_conv_prefill(
                x,
                self.weight,
                self.bias,
                state.get(x.shape[0], x),
                slots=state.slots,
                fresh=state.fresh,
                activation=self.activation,
                cu_seqlens=cu_seqlens,
                impl=self.impl,
            )
        before = None if state is None else state.value
        y, last = short_conv(
            x,
            self.weight,
            self.bias,
            activation=self.activation,
            initial_state=before,
            cu_seqlens=cu_seqlens,
            impl=self.impl,
        )
        if state is not None:
            state.set(last)
        return y

    def extra_repr(self) -> str:
        channels, width = self.weight.shape
        return f"{channels}, width={width}, bias={self.bias is not None}, activation={self.activation!r}"


def convolved(
    convs: Sequence[ShortConv],
    xs: Sequence[Float[Tensor, "B T _channels"]],
    states: Sequence[TensorState | None],
    *,
    cu_seqlens: Int[Tensor, "N_plus_1"] | None = None,
    step: bool = False,
) -> tuple[Tensor, ...]:
    """Return each convolution's output for its x, by one launch if all are plain and alike except in their channels.

    With biases, or with a state for only some of them, each convolution takes a launch of its own.

    Either every convolution has a state or none has; states are updated as by `ShortConv`. `step`: each row has one
    token, which continues its state.
    """
    if not is_plain(ShortConv, *convs):
        return _one_by_one(convs, xs, states, cu_seqlens, step)
    kinds = {(conv.weight.shape[1], conv.activation, conv.impl, conv.bias is None) for conv in convs}
    before = [None if state is None else state.value for state in states]
    begun = any(x is not None for x in before)
    alike = len(kinds) == 1 and convs[0].bias is None and not (begun and not step and None in before)
    if not alike or (step and None in states):
        return _one_by_one(convs, xs, states, cu_seqlens, step)
    weights = [conv.weight for conv in convs]
    activation, impl = convs[0].activation, convs[0].impl
    held = [state for state in states if state is not None]
    if step or (held and held[0].slots is not None):
        last = [state.get(len(x), x) for state, x in zip(held, xs, strict=True)]
        options: dict[str, Any] = {"slots": held[0].slots, "activation": activation, "impl": impl}
        if not step:
            return short_convs_prefill(xs, weights, last, fresh=held[0].fresh, cu_seqlens=cu_seqlens, **options)
        tokens = short_conv_steps([x.squeeze(1) for x in xs], weights, last, **options)
        return tuple(y.unsqueeze(1) for y in tokens)
    initial = [x for x in before if x is not None]
    outputs = short_convs(
        xs, weights, activation=activation, initial_states=initial or None, cu_seqlens=cu_seqlens, impl=impl
    )
    for state, (_, final_state) in zip(states, outputs, strict=True):
        if state is not None:
            state.set(final_state)
    return tuple(o for o, _ in outputs)


def _one_by_one(
    convs: Sequence[ShortConv],
    xs: Sequence[Tensor],
    states: Sequence[TensorState | None],
    cu_seqlens: Tensor | None,
    step: bool,
) -> tuple[Tensor, ...]:
    given = zip(convs, xs, states, strict=True)
    return tuple(conv(x, state=state, cu_seqlens=cu_seqlens, step=step) for conv, x, state in given)
