"""Linear layers of one input: for few tokens they are one launch, and their gradients of it are one sum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from tokenmix_core.kernels.launch import compat
from tokenmix_core.kernels.launch.cache import replay
from tokenmix_core.nn.dtypes import gives_float32
from tokenmix_core.nn.plain import is_plain, refuse_meta
from tokenmix_core.ops import fused_fused_linears
from tokenmix_core.ops.common import as_rows, refuse_graph
from tokenmix_core.ops.fused.gemv.sizes import MOST_BYTES, MOST_ROWS, MOST_WEIGHTS

# layers of fewer outputs share one product in training, of a multiple of _WHOLE outputs: rows of six heads are not
# aligned, and products of their own take several times as long as reading x
_THIN, _WHOLE = 64, 16
# tensors without a class of their own, which may compute otherwise
_ORDINARY = Tensor, nn.Parameter


def projected(x: Float[Tensor, "*tokens D"], *layers: nn.Module | None) -> tuple[Any, ...]:
    """The outputs of several linear layers, None for None: those of each, but that plain layers share launches.

    Without gradients up to six of them take one launch for one token, and for few if they are not large
    (`fused_fused_linears`).
    On a GPU, where x has a gradient, the products that make it add to one tensor, where torch makes one for each layer
    and adds these, and thin layers share a product, also where torch compiles a model; gradients of gradients there are
    none of then, as of kernels.
    """
    found = iter(_outputs(x, [layer for layer in layers if layer is not None]))
    return tuple(None if layer is None else next(found) for layer in layers)


def output_linear(x: Float[Tensor, "*tokens D"], layer: nn.Module) -> Tensor:
    """The output of one linear layer: for one token, without gradients, by a kernel that reads its weight sooner."""
    if not _can_share(x, [layer]):
        refuse_meta(x, layer)
    elif _by_kernel(x, [weight := cast(Tensor, layer.weight)]):
        return _by_fused_fused_linears(x, [weight])[0]
    return layer(x)


def split_linear(x: Float[Tensor, "*tokens D"], layer: nn.Module, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    """The output of a linear layer in parts of so many features, side by side.

    On a GPU, where x has a gradient, each part is a product of its own: gradients of parts of one tensor would be
    copied into the gradient of the whole, a tensor as wide as the layer.
    """
    if _can_share(x, [layer]) and _shares_gradient(x):
        weight: Any = layer.weight
        dtype = _dtype_of_products(x, [weight])
        if dtype is not None:
            return _products(x, weight.split(list(sizes)), dtype)
    return output_linear(x, layer).split(list(sizes), -1)


def _can_share(x: Tensor, layers: Sequence[nn.Module]) -> bool:
    """Tell whether products with the layers' weights are all that the layers do."""
    # where torch traces, the number of tokens, asked for, would make a graph for either answer
    usable = type(x) in _ORDINARY and (torch.compiler.is_compiling() or (replay.is_plain(x) and x.numel() > 0))
    return usable and all(is_plain_linear(layer) for layer in layers)


def _shares_gradient(x: Tensor) -> bool:
    """Tell whether products of x are to add to one gradient of it."""
    return torch.is_grad_enabled() and x.requires_grad and on_gpu(x) and not _forward_mode()


def _forward_mode() -> bool:
    """Tell whether forward-mode derivatives may be asked for; where torch traces there are none."""
    return not torch.compiler.is_compiling() and compat.forward_mode()


def _outputs(x: Tensor, layers: Sequence[nn.Module]) -> tuple[Tensor, ...]:
    if not _can_share(x, layers):
        refuse_meta(x, *layers)
        return tuple(layer(x) for layer in layers)
    weights: list[Tensor] = [layer.weight for layer in layers]  # type: ignore[misc]
    dtype = _dtype_of_products(x, weights)
    if dtype is not None and _shares_gradient(x):
        return _products(x, weights, dtype)
    return _by_fused_fused_linears(x, weights) if _by_kernel(x, weights) else tuple(layer(x) for layer in layers)


def _by_kernel(x: Tensor, weights: Sequence[Tensor]) -> bool:
    """Tell whether products are best made by `fused_fused_linears`: of few tokens, without gradients."""
    # what autocast makes of a layer is its own
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or torch.is_autocast_enabled(x.device.type):
        return False
    rows, number = x.numel() // x.shape[-1], len(weights)
    if (
        not 0 < number <= MOST_WEIGHTS
        or rows > MOST_ROWS
        or _forward_mode()
        or any(w.dtype != x.dtype for w in weights)
    ):
        return False
    return rows == 1 or (number > 1 and sum(w.nbytes for w in weights) <= MOST_BYTES * number)


def _by_fused_fused_linears(x: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
    found = fused_fused_linears(x.reshape(-1, x.shape[-1]), weights)
    return tuple(y.view(*x.shape[:-1], y.shape[-1]) for y in found)


def on_gpu(x: Tensor) -> bool:
    """Tell whether kernels are launched for x, by a function that torch's compiler reads, unlike `replay.on_gpu`."""
    return x.is_cuda


def _dtype_of_products(x: Tensor, weights: Sequence[Tensor]) -> torch.dtype | None:
    """The dtype in which torch would multiply; None where layers do not multiply numbers of one dtype."""
    dtypes = {x.dtype, *(weight.dtype for weight in weights)}
    if torch.is_autocast_enabled(x.device.type) and torch.float64 not in dtypes:
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype if len(dtypes) == 1 else None


def _products(x: Tensor, weights: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """x Wᵀ of each weight, multiplied in `dtype`, with gradients."""
    thin, wide = [w for w in weights if len(w) < _THIN], [w for w in weights if len(w) >= _THIN]
    if not thin:
        return _Products.apply(x, dtype, *wide)  # type: ignore[return-value]
    rows = [len(w) for w in thin]
    spare = -sum(rows) % _WHOLE
    shared, *own = _Products.apply(x, dtype, F.pad(torch.cat(thin), (0, 0, 0, spare)), *wide)  # type: ignore[misc]
    parts, own = iter(shared.split([*rows, spare], -1)), iter(own)
    return tuple(next(parts) if len(w) < _THIN else next(own) for w in weights)


class _Products(torch.autograd.Function):
    """x Wᵀ of weights `[N, D]`; the products that make x's gradient add to one tensor, in this order."""

    @staticmethod
    def forward(ctx, x, dtype, *weights):
        factor, factors = x.to(dtype), [weight.to(dtype) for weight in weights]
        ctx.save_for_backward(as_rows(factor), *factors)
        ctx.set_materialize_grads(False)
        ctx.of_x, ctx.of_weights = (x.shape, x.dtype), [weight.dtype for weight in weights]
        ctx.device_type = x.device.type
        # the wide ones are no views, which nobody could change in place
        return tuple(F.linear(factor, w) for w in factors)

    @staticmethod
    def backward(ctx, *dys):
        refuse_graph()
        if torch.compiler.is_compiling():
            # a context in here would end, for torch's compiler, that of the model around it
            return _Products._gradients(ctx, dys)
        # dtypes are as the forward pass had them, wherever `backward` is called
        with torch.autocast(ctx.device_type, enabled=False):
            return _Products._gradients(ctx, dys)

    @staticmethod
    def _gradients(ctx, dys):
        rows, *factors = ctx.saved_tensors
        dys = [None if dy is None else as_rows(dy) for dy in dys]
        dweights: list[Tensor | None] = [
            None if dy is None or not needed else _product(dy.t(), rows, dtype)
            for dy, needed, dtype in zip(dys, ctx.needs_input_grad[2:], ctx.of_weights, strict=True)
        ]
        terms = [(dy, factor) for dy, factor in zip(dys, factors, strict=True) if dy is not None]
        if not ctx.needs_input_grad[0] or not terms:
            return None, None, *dweights
        add = sum_of_products_op if torch.compiler.is_compiling() else _sum_of_products
        shape, dtype = ctx.of_x
        return add(*map(list, zip(*terms, strict=True))).view(shape).to(dtype), None, *dweights


def _sum_of_products(a: list[Tensor], b: list[Tensor]) -> Tensor:
    """Σ a b of matrices `[T, N]` and `[N, D]`, for which one tensor is made."""
    total = torch.mm(a[0], b[0])
    for x, y in zip(a[1:], b[1:], strict=True):
        total.addmm_(x, y)
    return total


@torch.library.custom_op("tokenmix_core::sum_of_products", mutates_args=())
def sum_of_products_op(a: list[Tensor], b: list[Tensor]) -> Tensor:
    """The same where torch traces: its compiler would copy the sum so far before each product that it adds."""
    with torch.autocast(a[0].device.type, enabled=False):
        return _sum_of_products(a, b)


@sum_of_products_op.register_fake
def _(a, b):
    return a[0].new_empty(a[0].shape[0], b[0].shape[1])


def _product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a b in `dtype`; sums in float32 are not rounded on their way to it where a device's products can give them.

    In models that torch compiles they are, as those of its layers.
    """
    if dtype == torch.float32 and gives_float32(a) and not torch.compiler.is_compiling():
        return torch.mm(a, b, out_dtype=dtype)
    return torch.mm(a, b).to(dtype)


def is_plain_linear(layer: nn.Module) -> bool:
    """True if a layer is torch's own without a bias, and reading its weight gives what calling it gives."""
    return is_plain(nn.Linear, layer) and layer.bias is None
