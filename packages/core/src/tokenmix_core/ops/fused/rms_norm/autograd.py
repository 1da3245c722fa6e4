"""The kernels as differentiable functions of eager mode; inputs alone are kept."""

from __future__ import annotations

from torch import Tensor

from tokenmix_core.kernels.launch.cache.replay import Replayed
from tokenmix_core.ops.autograd import eager_function
from tokenmix_core.ops.buffers import as_rows
from tokenmix_core.ops.fused.rms_norm.kernels import rms_norm_backward, rms_norm_forward


def _run(x, branch, weight, eps, dtype):
    branch = None if branch is None else as_rows(branch)
    y, total = rms_norm_forward(
        x=as_rows(x), branch=branch, z=None, weight=weight.contiguous(), eps=eps, size=x.shape[-1], before=False,
        dtype=dtype,
    )  # fmt: skip
    return (y.view(x.shape),) if total is None else (y.view(x.shape), total.view(x.shape))


def _save(ctx, inputs, output) -> None:
    x, branch, weight, ctx.eps, _ = inputs
    ctx.save_for_backward(x if branch is None else output[1], weight)
    ctx.dtypes = x.dtype, None if branch is None else branch.dtype
    ctx.set_materialize_grads(False)


def _backward(h, weight, dy, dtotal, eps, dtype, branch_dtype):
    dtotal = None if dtotal is None else as_rows(dtotal)
    dx, dbranch, _, dweight = rms_norm_backward(
        h=as_rows(h), z=None, weight=weight.contiguous(), dy=as_rows(dy), dtotal=dtotal, eps=eps, size=h.shape[-1],
        before=False, dtype=dtype, branch_dtype=branch_dtype,
    )  # fmt: skip
    return dx.view(h.shape), None if dbranch is None else dbranch.view(h.shape), dweight


_replayed = Replayed(_backward)


def _gradients(ctx, dy, dtotal=None):
    h, weight = ctx.saved_tensors
    dtype, branch_dtype = ctx.dtypes
    if dy is None:
        assert dtotal is not None, "one of the results was used"
        return dtotal.to(dtype), None if branch_dtype is None else dtotal.to(branch_dtype), None, None, None
    return *_replayed(h, weight, dy, dtotal, ctx.eps, dtype, branch_dtype), None, None


def _run_gated(x, z, weight, eps, before, size, dtype) -> Tensor:
    z = None if z is None else as_rows(z)
    y, _ = rms_norm_forward(
        x=as_rows(x), branch=None, z=z, weight=weight.contiguous(), eps=eps, size=size, before=before, dtype=dtype
    )
    return y.view(x.shape)


def _save_gated(ctx, inputs, output) -> None:
    x, z, weight, *ctx.options = inputs
    ctx.save_for_backward(x, z, weight)


def _backward_gated(x, z, weight, dy, eps, before, size):
    z = None if z is None else as_rows(z)
    dx, _, dz, dweight = rms_norm_backward(
        h=as_rows(x), z=z, weight=weight.contiguous(), dy=as_rows(dy), dtotal=None, eps=eps, size=size, before=before,
        dtype=x.dtype, branch_dtype=None,
    )  # fmt: skip
    return dx.view(x.shape), None if dz is None else dz.view(x.shape), dweight


_replayed_gated = Replayed(_backward_gated)


def _gradients_gated(ctx, dy):
    eps, before, size, _ = ctx.options
    return *_replayed_gated(*ctx.saved_tensors, dy, eps, before, size), None, None, None, None


norm = eager_function(_run, _save, _gradients)
gated = eager_function(_run_gated, _save_gated, _gradients_gated)
