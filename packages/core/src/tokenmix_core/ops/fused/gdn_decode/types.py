"""What a layer's step is given, by the names that its kernel knows it by."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# the fields that a call overwrites
WRITTEN = ("q_inputs", "k_inputs", "v_inputs", "state", "arrivals")


class Inputs(NamedTuple):
    """What the step is given, as `delta_layer_step` explains it."""

    q: Tensor
    k: Tensor
    v: Tensor
    a: Tensor
    b: Tensor
    gate: Tensor | None
    q_weight: Tensor
    k_weight: Tensor
    v_weight: Tensor
    q_inputs: Tensor
    k_inputs: Tensor
    v_inputs: Tensor
    A_log: Tensor
    dt_bias: Tensor
    norm_weight: Tensor
    state: Tensor
    arrivals: Tensor
    scale: float
    max_beta: float
    eps: float

    def readable(self) -> Inputs:
        """The same as the kernel reads it: rows of tokens lie at one stride, weights and parameters are contiguous."""
        q, k, v, gate = (None if x is None else _rows(x) for x in (self.q, self.k, self.v, self.gate))
        a, b = (x if x.stride(1) == 1 else x.contiguous() for x in (self.a, self.b))
        names = "q_weight", "k_weight", "v_weight", "A_log", "dt_bias", "norm_weight"
        contiguous = {name: getattr(self, name).contiguous() for name in names}
        return self._replace(q=q, k=k, v=v, gate=gate, a=a, b=b, **contiguous)


def _rows(x: Tensor) -> Tensor:
    """x `[B, H, D]` itself where the heads of a row lie side by side, as in a slice of wider rows."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.clone(memory_format=torch.contiguous_format)
