"""The gated sum as an autograd function for eager mode; for the backward it saves branches' outputs and gates."""

from __future__ import annotations

from torch import Tensor

from tokenmix_core.kernels import Replayed
from tokenmix_core.ops import as_rows, eager_function
from tokenmix_lte.ops.branches.kernels import gated_sum_backward, gated_sum_forward


def _run(compressed, selected, window, gates) -> Tensor:
    rows = (as_rows(x) for x in (compressed, selected, window, gates))
    return gated_sum_forward(*rows).view(compressed.shape)


def _save(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def _backward(compressed, selected, window, gates, do) -> tuple[Tensor, ...]:
    given = compressed, selected, window, gates
    grads = gated_sum_backward(*(as_rows(x) for x in (*given, do)))
    return tuple(grad.view(x.shape) for grad, x in zip(grads, given, strict=True))


_replayed = Replayed(_backward)

gated_sum_triton = eager_function("gated_sum", _run, _save, lambda ctx, do: _replayed(*ctx.saved_tensors, do))
