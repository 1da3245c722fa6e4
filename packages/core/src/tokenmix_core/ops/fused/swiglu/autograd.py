"""The kernels as differentiable functions of eager mode; a and b alone are kept."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenmix_core.kernels.launch.cache.replay import Replayed
from tokenmix_core.ops.autograd import eager_function
from tokenmix_core.ops.buffers import as_rows
from tokenmix_core.ops.fused.gemv.kernel import fused_linears_forward
from tokenmix_core.ops.fused.gemv.sizes import DTYPES
from tokenmix_core.ops.fused.swiglu.kernels import swiglu_backward, swiglu_forward


def _run(a, b) -> Tensor:
    return swiglu_forward(as_rows(a), as_rows(b)).view(a.shape)


def _save(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def _backward(a, b, dh):
    da, db = swiglu_backward(as_rows(a), as_rows(b), as_rows(dh), False)
    return da.view(a.shape), db.view(b.shape)


_replayed = Replayed(_backward)


def _run_linear(a, b, weight, residual) -> Tensor:
    a_rows, b_rows, shape = as_rows(a), as_rows(b), (*a.shape[:-1], len(weight))
    if len(a_rows) == 1 and a.dtype in DTYPES:
        # of one token the product is made where it is read, and the sum where it is written
        added = None if residual is None else as_rows(residual)
        return fused_linears_forward(b_rows, [weight], gate=a_rows, residual=added)[0].view(shape)
    y = torch.mm(swiglu_forward(a_rows, b_rows), weight.t()).view(shape)
    return y if residual is None else residual + y


def _save_linear(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs[:3])


def _backward_linear(a, b, weight, dy):
    rows = as_rows(dy)
    dh = torch.mm(rows, weight)
    da, db = swiglu_backward(as_rows(a), as_rows(b), dh, True)
    # dh no more, but h
    return da.view(a.shape), db.view(b.shape), torch.mm(rows.t(), dh)


_replayed_linear = Replayed(_backward_linear)

product = eager_function(_run, _save, lambda ctx, dh: _replayed(*ctx.saved_tensors, dh))


def _gradients_linear(ctx, dy):
    product = any(ctx.needs_input_grad[:3])
    of_product = _replayed_linear(*ctx.saved_tensors, dy) if product else (None, None, None)
    return *of_product, dy if ctx.needs_input_grad[3] else None


linear = eager_function(_run_linear, _save_linear, _gradients_linear)
