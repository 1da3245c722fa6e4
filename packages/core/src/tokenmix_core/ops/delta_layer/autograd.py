"""The kernel as a function: direct in eager mode, a custom op where torch traces."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenmix_core.ops.common import direct_when_eager, recorded_op

_WRITTEN = ("q_inputs", "k_inputs", "v_inputs", "state", "arrivals")


def _rows(x: Tensor) -> Tensor:
    """x `[B, H, D]` itself where the heads of a row lie side by side, as in a slice of wider rows."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.clone(memory_format=torch.contiguous_format)


def run_step(
    q, k, v, a, b, gate, q_weight, k_weight, v_weight, q_inputs, k_inputs, v_inputs, A_log, dt_bias, norm_weight, state,
    arrivals, scale, max_beta, eps,
) -> Tensor:  # fmt: skip
    """y; the last inputs and the state are overwritten."""
    from tokenmix_core.ops.delta_layer.kernel import delta_layer_step

    q, k, v = map(_rows, (q, k, v))
    gate = None if gate is None else _rows(gate)
    a, b = (x if x.stride(1) == 1 else x.contiguous() for x in (a, b))
    weights = [x.contiguous() for x in (q_weight, k_weight, v_weight)]
    parameters = (x.contiguous() for x in (A_log, dt_bias, norm_weight))
    inputs = [q_inputs, k_inputs, v_inputs]
    return delta_layer_step(
        q, k, v, a, b, gate, weights, inputs, *parameters, state, arrivals, scale, max_beta, eps
    )  # fmt: skip


@recorded_op("tokenmix_core::delta_layer_step", mutates_args=set(_WRITTEN))
def delta_layer_step_op(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, gate: Tensor | None, q_weight: Tensor, k_weight: Tensor,
    v_weight: Tensor, q_inputs: Tensor, k_inputs: Tensor, v_inputs: Tensor, A_log: Tensor, dt_bias: Tensor,
    norm_weight: Tensor, state: Tensor, arrivals: Tensor, scale: float, max_beta: float, eps: float,
) -> Tensor:  # fmt: skip
    """`run_step` for torch to trace."""
    return run_step(
        q, k, v, a, b, gate, q_weight, k_weight, v_weight, q_inputs, k_inputs, v_inputs, A_log, dt_bias, norm_weight,
        state, arrivals, scale, max_beta, eps,
    )  # fmt: skip


@delta_layer_step_op.register_fake
def _(q, k, v, *rest):
    return v.new_empty(v.shape)


step = direct_when_eager(delta_layer_step_op, run_step, writes=15)
