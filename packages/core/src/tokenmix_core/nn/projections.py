"""Linear layers that share an input: one launch for few tokens, and one buffer for the input's gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from tokenmix_core.kernels.launch import compat
from tokenmix_core.kernels.launch.cache import capture
from tokenmix_core.nn.dtypes import has_float32_output
from tokenmix_core.nn.plain import is_plain, refuse_meta
from tokenmix_core.ops import fused_linears
from tokenmix_core.ops.buffers import as_rows
from tokenmix_core.ops.fused import MAX_WEIGHTS
from tokenmix_core.ops.fused.gemv import MAX_BYTES, MAX_ROWS
from tokenmix_core.ops.transforms import refuse_graph

# layers with fewer than _THIN outputs share one GEMM in training, padded to a multiple of _MULTIPLE outputs: rows of
# six heads are not aligned, and separate GEMMs take several times as long as reading x
_THIN, _MULTIPLE = 64, 16
# tensor subclasses may compute otherwise
_ORDINARY = Tensor, nn.Parameter


def projected(x: Float[Tensor, "*tokens D"], *layers: nn.Module | None) -> tuple[Any, ...]:
    """Return the outputs of several linear layers of x, None for a layer that is None.

    Without gradients, up to six plain layers take one launch for one token, and for a few tokens if their weights are
    small (`fused_linears`). On a GPU, if x requires a gradient, the GEMMs of the backward accumulate into one
    gradient of x (torch allocates one per layer and adds them), and layers with few outputs share a GEMM, also under
    torch.compile. Second derivatives are then not available, as for kernels.
    """
    found = iter(_outputs(x, [layer for layer in layers if layer is not None]))
    return tuple(None if layer is None else next(found) for layer in layers)


def output_linear(x: Float[Tensor, "*tokens D"], layer: nn.Module) -> Tensor:
    """Return the output of one linear layer; one token without gradients takes a GEMV that prefetches the weight."""
    if not _can_share(x, [layer]):
        refuse_meta(x, layer)
    elif _by_kernel(x, [weight := cast(Tensor, layer.weight)]):
        return _by_fused_linears(x, [weight])[0]
    return layer(x)


def split_linear(x: Float[Tensor, "*tokens D"], layer: nn.Module, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    """Return the output of a linear layer, split into parts of `sizes` features.

    On a GPU, if x requires a gradient, each part is a separate GEMM: autograd would copy the gradients of slices into a
    tensor as wide as the layer.
    """
    if _can_share(x, [layer]) and _shares_gradient(x):
        weight: Any = layer.weight
        dtype = _matmul_dtype(x, [weight])
        if dtype is not None:
            return _linears(x, weight.split(list(sizes)), dtype)
    return output_linear(x, layer).split(list(sizes), -1)


def _can_share(x: Tensor, layers: Sequence[nn.Module]) -> bool:
    """True if calling the layers gives the same as multiplying x by their weights."""
    # under torch.compile, a test of the number of tokens would trace a graph per answer
    usable = type(x) in _ORDINARY and (torch.compiler.is_compiling() or (capture.is_plain(x) and x.numel() > 0))
    return usable and all(is_plain_linear(layer) for layer in layers)


def _shares_gradient(x: Tensor) -> bool:
    """True if the backward pass of all layers accumulates into one gradient of x."""
    return torch.is_grad_enabled() and x.requires_grad and on_gpu(x) and not _transformed()


def _transformed() -> bool:
    """Return whether forward-mode derivatives or function transforms may be active; never under torch.compile."""
    return not torch.compiler.is_compiling() and compat.transformed()


def _outputs(x: Tensor, layers: Sequence[nn.Module]) -> tuple[Tensor, ...]:
    if not _can_share(x, layers):
        refuse_meta(x, *layers)
        return tuple(layer(x) for layer in layers)
    weights: list[Tensor] = [layer.weight for layer in layers]  # type: ignore[misc]
    dtype = _matmul_dtype(x, weights)
    if dtype is not None and _shares_gradient(x):
        return _linears(x, weights, dtype)
    return _by_fused_linears(x, weights) if _by_kernel(x, weights) else tuple(layer(x) for layer in layers)


def _by_kernel(x: Tensor, weights: Sequence[Tensor]) -> bool:
    """True if `fused_linears` is the fastest implementation: few tokens, no gradients."""
    # under autocast, layers cast their inputs
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or torch.is_autocast_enabled(x.device.type):
        return False
    rows, count = x.numel() // x.shape[-1], len(weights)
    if not 0 < count <= MAX_WEIGHTS or rows > MAX_ROWS or _transformed() or any(w.dtype != x.dtype for w in weights):
        return False
    return rows == 1 or (count > 1 and sum(w.nbytes for w in weights) <= MAX_BYTES * count)


def _by_fused_linears(x: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
    found = fused_linears(x.reshape(-1, x.shape[-1]), weights)
    return tuple(y.view(*x.shape[:-1], y.shape[-1]) for y in found)


def on_gpu(x: Tensor) -> bool:
    """Return whether kernels are launched for x; torch.compile can trace this function, unlike `replay.on_gpu`."""
    return x.is_cuda


def _matmul_dtype(x: Tensor, weights: Sequence[Tensor]) -> torch.dtype | None:
    """Return the dtype in which torch would multiply; None if input and weights have different dtypes."""
    dtypes = {x.dtype, *(weight.dtype for weight in weights)}
    if torch.is_autocast_enabled(x.device.type) and torch.float64 not in dtypes:
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype if len(dtypes) == 1 else None


def _linears(x: Tensor, weights: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return x Wᵀ of each weight, multiplied in `dtype`, with gradients."""
    thin, wide = [w for w in weights if len(w) < _THIN], [w for w in weights if len(w) >= _THIN]
    if not thin:
        return _Linears.apply(x, dtype, *wide)  # type: ignore[return-value]
    rows = [len(w) for w in thin]
    spare = -sum(rows) % _MULTIPLE
    shared, *own = _Linears.apply(x, dtype, F.pad(torch.cat(thin), (0, 0, 0, spare)), *wide)  # type: ignore[misc]
    parts, own = iter(shared.split([*rows, spare], -1)), iter(own)
    return tuple(next(parts) if len(w) < _THIN else next(own) for w in weights)


class _Linears(torch.autograd.Function):
    """x Wᵀ of weights `[N, D]`; the backward adds to one gradient of x, in the order of the weights."""

    @staticmethod
    def forward(ctx, x, dtype, *weights):
        factor, factors = x.to(dtype), [weight.to(dtype) for weight in weights]
        ctx.save_for_backward(as_rows(factor), *factors)
        ctx.set_materialize_grads(False)
        ctx.of_x, ctx.of_weights = (x.shape, x.dtype), [weight.dtype for weight in weights]
        ctx.device_type = x.device.type
        # wide outputs are not views, so that callers may overwrite them
        return tuple(F.linear(factor, w) for w in factors)

    @staticmethod
    def backward(ctx, *dys):
        refuse_graph("linear layers that share an input")
        if torch.compiler.is_compiling():
            # torch.compile ends the model's own autocast context at the end of a nested one
            return _Linears._gradients(ctx, dys)
        # use the forward's dtypes, also if `backward` is called under autocast
        with torch.autocast(ctx.device_type, enabled=False):
            return _Linears._gradients(ctx, dys)

    @staticmethod
    def _gradients(ctx, dys):
        rows, *factors = ctx.saved_tensors
        dys = [None if dy is None else as_rows(dy) for dy in dys]
        dweights: list[Tensor | None] = [
            None if dy is None or not needed else _matmul(dy.t(), rows, dtype)
            for dy, needed, dtype in zip(dys, ctx.needs_input_grad[2:], ctx.of_weights, strict=True)
        ]
        terms = [(dy, factor) for dy, factor in zip(dys, factors, strict=True) if dy is not None]
        if not ctx.needs_input_grad[0] or not terms:
            return None, None, *dweights
        add = sum_of_matmuls_op if torch.compiler.is_compiling() else _sum_of_matmuls
        shape, dtype = ctx.of_x
        return add(*map(list, zip(*terms, strict=True))).view(shape).to(dtype), None, *dweights


def _sum_of_matmuls(a: list[Tensor], b: list[Tensor]) -> Tensor:
    """Return Σ a b of matrices `[T, N]` and `[N, D]`, accumulated in one tensor."""
    total = torch.mm(a[0], b[0])
    for x, y in zip(a[1:], b[1:], strict=True):
        total.addmm_(x, y)
    return total


@torch.library.custom_op("tokenmix_core::sum_of_matmuls", mutates_args=())
def sum_of_matmuls_op(a: list[Tensor], b: list[Tensor]) -> Tensor:
    """`_sum_of_matmuls` for torch.compile, which would copy the partial sum before each addmm."""
    with torch.autocast(a[0].device.type, enabled=False):
        return _sum_of_matmuls(a, b)


@sum_of_matmuls_op.register_fake
def _(a, b):
    return a[0].new_empty(a[0].shape[0], b[0].shape[1])


def _matmul(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a b in `dtype`, float32 sums of a 16-bit GEMM unrounded.

    Under torch.compile they are rounded, as in torch's layers.
    """
    if dtype == torch.float32 and has_float32_output(a) and not torch.compiler.is_compiling():
        return torch.mm(a, b, out_dtype=dtype)
    return torch.mm(a, b).to(dtype)


def is_plain_linear(layer: nn.Module) -> bool:
    """True if a layer is torch's own without a bias, and calling it equals multiplying by its weight."""
    return is_plain(nn.Linear, layer) and layer.bias is None


def is_sharded_linear(layer: nn.Module) -> bool:
    """True if FSDP2 shards a layer that was plain before, and no other hook is on it."""
    hooks = len(layer._forward_pre_hooks), len(layer._forward_hooks), len(layer._backward_hooks)
    own = type(layer).__name__ == "FSDPLinear" and type(layer).__bases__[-1] is nn.Linear
    return own and hooks == (1, 1, 0) and layer.bias is None and "forward" not in layer.__dict__
