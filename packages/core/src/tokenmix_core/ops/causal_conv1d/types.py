"""Arguments of the operators of the short convolution."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Inputs(NamedTuple):
    """Arguments of `short_conv`."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    activation: str | None
    initial_state: Tensor | None
    cu_seqlens: Tensor | None


class BackwardInputs(NamedTuple):
    """Arguments of the backward of `short_conv`: the forward's arguments, and gradients of o and the final state."""

    inputs: Inputs
    do: Tensor
    final_gradient: Tensor | None


class SeveralInputs(NamedTuple):
    """Arguments of `short_convs`, for two or three inputs."""

    x0: Tensor
    x1: Tensor
    x2: Tensor | None
    weight0: Tensor
    weight1: Tensor
    weight2: Tensor | None
    activation: str | None
    initial0: Tensor | None
    initial1: Tensor | None
    initial2: Tensor | None
    cu_seqlens: Tensor | None


class SeveralBackwardInputs(NamedTuple):
    """Arguments of the backward of `short_convs`: the forward's, and the gradients of each output and final state."""

    inputs: SeveralInputs
    do0: Tensor
    do1: Tensor
    do2: Tensor | None
    dfinal0: Tensor | None
    dfinal1: Tensor | None
    dfinal2: Tensor | None


class PrefillInputs(NamedTuple):
    """Arguments of `short_conv_prefill`; slots of `state` are overwritten."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    state: Tensor
    slots: Tensor
    fresh: Tensor | None
    activation: str | None
    cu_seqlens: Tensor | None


class StepInputs(NamedTuple):
    """Arguments of `short_conv_step`; `state` is overwritten."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    state: Tensor
    activation: str | None
    slots: Tensor | None = None


class SeveralStates(NamedTuple):
    """Tensors of two or three inputs; the states, or their slots, are overwritten."""

    x0: Tensor
    x1: Tensor
    x2: Tensor | None
    weight0: Tensor
    weight1: Tensor
    weight2: Tensor | None
    state0: Tensor
    state1: Tensor
    state2: Tensor | None


class PrefillsInputs(NamedTuple):
    """Arguments of `short_convs_prefill`."""

    tensors: SeveralStates
    slots: Tensor
    fresh: Tensor | None
    activation: str | None
    cu_seqlens: Tensor | None


class StepsInputs(NamedTuple):
    """Arguments of `short_conv_steps`."""

    tensors: SeveralStates
    activation: str | None
    slots: Tensor | None = None
