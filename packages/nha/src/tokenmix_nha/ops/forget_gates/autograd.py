"""The kernels as a differentiable function for eager mode; it saves only f for the backward."""

from __future__ import annotations

from torch import Tensor

from tokenmix_core.kernels import Replayed
from tokenmix_core.ops import as_rows, eager_function
from tokenmix_nha.ops.forget_gates.kernels import forget_gates_backward, forget_gates_forward


def _run(f: Tensor, normalizer: float) -> Tensor:
    return forget_gates_forward(f=as_rows(f), normalizer=normalizer).view(f.shape)


def _save(ctx, inputs, output) -> None:
    f, ctx.normalizer = inputs
    ctx.save_for_backward(f)


def _backward(f: Tensor, dy: Tensor, normalizer: float) -> Tensor:
    return forget_gates_backward(f=as_rows(f), dy=as_rows(dy), normalizer=normalizer).view(f.shape)


_replayed = Replayed(_backward)


def _gradients(ctx, dy):
    return _replayed(*ctx.saved_tensors, dy, ctx.normalizer), None


gates = eager_function("log_forget_gates", _run, _save, _gradients)
