"""The kernels as a differentiable function of eager mode; x is kept only where a norm needs it."""

from __future__ import annotations

from torch import Tensor

from tokenmix_core.kernels.launch.cache.replay import Replayed
from tokenmix_core.ops.autograd import eager_function
from tokenmix_core.ops.buffers import as_rows
from tokenmix_core.ops.fused.rotary import kernels


def _tokens(x: Tensor) -> Tensor:
    """x `[B, T, H, K]` as `[B · T, H · K]`."""
    return as_rows(x.flatten(2))


def _angles(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]).contiguous()


def _run(x, weight, cos, sin, eps) -> Tensor:
    weight = None if weight is None else weight.contiguous()
    y = kernels.rotate_forward(x=_tokens(x), weight=weight, cos=_angles(cos), sin=_angles(sin), H=x.shape[2], eps=eps)
    return y.view(x.shape)


def _save(ctx, inputs, output) -> None:
    x, weight, cos, sin, ctx.eps = inputs
    ctx.save_for_backward(None if weight is None else x, weight, cos, sin)


def _backward(dy, x, weight, cos, sin, eps):
    x = None if x is None else _tokens(x)
    weight = None if weight is None else weight.contiguous()
    dx, dweight = kernels.rotate_backward(
        x=x, weight=weight, cos=_angles(cos), sin=_angles(sin), dy=_tokens(dy), H=dy.shape[2], eps=eps
    )
    return dx.view(dy.shape), dweight


def _run_step(q, k, v, q_weight, k_weight, cos, sin, keys, values, places, eps) -> Tensor:
    q, k, v = (None if x is None else as_rows(x.flatten(1)).view(x.shape) for x in (q, k, v))
    q_weight, k_weight = (None if w is None else w.contiguous() for w in (q_weight, k_weight))
    cos, sin = (None if x is None else _angles(x) for x in (cos, sin))
    places = None if places is None else places.contiguous()
    return kernels.rotate_step(
        q=q, k=k, v=v, q_weight=q_weight, k_weight=k_weight, cos=cos, sin=sin, keys=keys, values=values, places=places,
        eps=eps,
    )  # fmt: skip


rotate_step = Replayed(_run_step)
_replayed = Replayed(_backward)
rotate = eager_function(_run, _save, lambda ctx, dy: (*_replayed(dy, *ctx.saved_tensors, ctx.eps), None, None, None))
