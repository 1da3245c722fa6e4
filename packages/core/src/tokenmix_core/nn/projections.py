"""Linear layers that read the same input: one kernel for few tokens, and one buffer for the input's gradient."""

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
from tokenmix_core.ops.fused.gemv import MAX_BYTES, MAX_ROWS, has_slow_rows
from tokenmix_core.ops.transforms import refuse_graph

# in training, layers with fewer than _THIN outputs share one GEMM, padded to a multiple of _MULTIPLE outputs: alone, a
# GEMM with e.g. six outputs has unaligned rows and takes several times as long as reading x
_THIN, _MULTIPLE = 64, 16
# `join_weights` pads the rows of a joint weight to a multiple of _ALIGNED, so that rows of the outputs stay aligned
_ALIGNED = 16
# only tensors of these classes share GEMMs: other subclasses may define their own matmul
_ORDINARY = Tensor, nn.Parameter


def projected(x: Float[Tensor, "*tokens D"], *layers: nn.Module | None) -> tuple[Any, ...]:
    """Return the output of each layer for x; the output of a layer that is None is None.

    Without gradients, up to six plain layers take one launch (`fused_linears`) for one token, and for a few tokens if
    the layers' weights are small. If x is on a GPU and requires a gradient, the GEMMs of the backward accumulate into
    one gradient of x, whereas torch allocates one per layer and adds them; layers with few outputs share a GEMM, also
    under torch.compile. Second derivatives are not available, as for kernels.
    """
    found = iter(_outputs(x, [layer for layer in layers if layer is not None]))
    return tuple(None if layer is None else next(found) for layer in layers)


def join_weights(layers: Sequence[nn.Module]) -> None:
    """Move the weights of layers to one tensor, of which they become slices, for inference.

    Without gradients, `projected` then multiplies x by this tensor: one GEMM for all layers, whose outputs are slices
    of one tensor. Layers that are not plain, or differ in dtype or device, stay as they are.
    """
    weights: list[Tensor] = [layer.weight for layer in layers if is_plain_linear(layer)]  # type: ignore[misc]
    if len(weights) < max(2, len(layers)) or len({(w.dtype, w.device, w.shape[1]) for w in weights}) > 1:
        return
    # thin layers last: slices of the others then begin at multiples of 16 bytes
    order = sorted(range(len(weights)), key=lambda i: len(weights[i]) % _ALIGNED > 0)
    rows = sum(map(len, weights))
    joint = weights[0].new_zeros(rows + -rows % _ALIGNED, weights[0].shape[1])
    for i, part in zip(order, joint.split([*(len(weights[j]) for j in order), -rows % _ALIGNED]), strict=False):
        part.copy_(weights[i].detach())
        layers[i].weight = nn.Parameter(part, requires_grad=weights[i].requires_grad)
    layers[0].__dict__["joint_rows"] = len(joint)


def _joint_outputs(x: Tensor, layers: Sequence[nn.Module], weights: Sequence[Tensor]) -> tuple[Tensor, ...] | None:
    """Return the outputs of layers whose weights `join_weights` has joined; None if it has not, or they have moved."""
    first, rows = weights[0], vars(layers[0]).get("joint_rows")
    if rows is None or torch.compiler.is_compiling() or torch.is_grad_enabled() or _matmul_dtype(x, weights) != x.dtype:
        return None
    storage, size = first.untyped_storage(), first.shape[1]
    moved = storage.nbytes() != rows * size * first.itemsize
    if moved or any(w.untyped_storage().data_ptr() != storage.data_ptr() for w in weights):
        return None
    found = F.linear(x, first.as_strided((rows, size), (size, 1), 0))
    starts = [w.storage_offset() // size for w in weights]
    return tuple(found[..., start : start + len(w)] for start, w in zip(starts, weights, strict=True))


def output_linear(x: Float[Tensor, "*tokens D"], layer: nn.Module) -> Tensor:
    """Return layer(x), by `fused_linears` if that is faster (`_by_kernel`), as for one token without gradients."""
    if not _can_share(x, [layer]):
        refuse_meta(x, layer)
    elif _by_kernel(x, [weight := cast(Tensor, layer.weight)]):
        return _by_fused_linears(x, [weight])[0]
    return layer(x)


def split_linear(x: Float[Tensor, "*tokens D"], layer: nn.Module, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    """Return layer(x), split along the features into tensors of the given `sizes`.

    If x is on a GPU and requires a gradient, one GEMM computes each tensor: for slices of a single output, autograd
    would copy their gradients into one tensor as wide as the layer.
    """
    if _can_share(x, [layer]) and _shares_gradient(x):
        weight: Any = layer.weight
        dtype = _matmul_dtype(x, [weight])
        if dtype is not None:
            return _linears(x, weight.split(list(sizes)), dtype)
    return output_linear(x, layer).split(list(sizes), -1)


def _can_share(x: Tensor, layers: Sequence[nn.Module]) -> bool:
    """True if multiplying x by the layers' weights is equivalent to calling the layers."""
    # under torch.compile no branch may depend on the number of tokens: each outcome would become a graph of its
    # own
    usable = type(x) in _ORDINARY and (torch.compiler.is_compiling() or (capture.is_plain(x) and x.numel() > 0))
    return usable and all(is_plain_linear(layer) for layer in layers)


def _shares_gradient(x: Tensor) -> bool:
    """True if the backward pass of all layers should accumulate into one gradient of x."""
    return torch.is_grad_enabled() and x.requires_grad and on_gpu(x) and not _transformed()


def _transformed() -> bool:
    """Return whether forward-mode derivatives or torch.func transforms may be active; under torch.compile False."""
    return not torch.compiler.is_compiling() and compat.transformed()


def _outputs(x: Tensor, layers: Sequence[nn.Module]) -> tuple[Tensor, ...]:
    if not _can_share(x, layers):
        refuse_meta(x, *layers)
        return tuple(layer(x) for layer in layers)
    weights: list[Tensor] = [layer.weight for layer in layers]  # type: ignore[misc]
    dtype = _matmul_dtype(x, weights)
    if dtype is not None and _shares_gradient(x):
        return _linears(x, weights, dtype)
    if _by_kernel(x, weights):
        return _by_fused_linears(x, weights)
    joint = _joint_outputs(x, layers, weights) if layers else ()
    return tuple(layer(x) for layer in layers) if joint is None else joint


def _by_kernel(x: Tensor, weights: Sequence[Tensor]) -> bool:
    """True if `fused_linears` is the fastest for x: one token, few tokens and small weights, or `has_slow_rows`.

    False with gradients, under autocast and under torch.compile.
    """
    # do not use the kernel under autocast: layers then cast their inputs, which the kernel does not
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or torch.is_autocast_enabled(x.device.type):
        return False
    rows, count = x.numel() // x.shape[-1], len(weights)
    if not 0 < count <= MAX_WEIGHTS or rows > MAX_ROWS or _transformed() or any(w.dtype != x.dtype for w in weights):
        return False
    small = count > 1 and sum(w.nbytes for w in weights) <= MAX_BYTES * count
    return rows == 1 or small or has_slow_rows(x)


def _by_fused_linears(x: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
    found = fused_linears(x.reshape(-1, x.shape[-1]), weights)
    return tuple(y.view(*x.shape[:-1], y.shape[-1]) for y in found)


def on_gpu(x: Tensor) -> bool:
    """Return whether kernels are launched for x. Unlike `replay.on_gpu`, torch.compile can trace this function."""
    return x.is_cuda


def _matmul_dtype(x: Tensor, weights: Sequence[Tensor]) -> torch.dtype | None:
    """Return the dtype in which torch would multiply x by the weights; None if their dtypes make it raise an error."""
    dtypes = {x.dtype, *(weight.dtype for weight in weights)}
    if torch.is_autocast_enabled(x.device.type) and torch.float64 not in dtypes:
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype if len(dtypes) == 1 else None


def _linears(x: Tensor, weights: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return x Wᵀ for each weight W, multiplied in `dtype`; differentiable."""
    thin, wide = [w for w in weights if len(w) < _THIN], [w for w in weights if len(w) >= _THIN]
    if not thin:
        return _Linears.apply(x, dtype, *wide)  # type: ignore[return-value]
    rows = [len(w) for w in thin]
    spare = -sum(rows) % _MULTIPLE
    shared, *own = _Linears.apply(x, dtype, F.pad(torch.cat(thin), (0, 0, 0, spare)), *wide)  # type: ignore[misc]
    parts, own = iter(shared.split([*rows, spare], -1)), iter(own)
    return tuple(next(parts) if len(w) < _THIN else next(own) for w in weights)


class _Linears(torch.autograd.Function):
    """x Wᵀ for each weight W `[N, D]`; the backward adds the contributions of all weights to one gradient of x."""

    @staticmethod
    def forward(ctx, x, dtype, *weights):
        factor, factors = x.to(dtype), [weight.to(dtype) for weight in weights]
        ctx.save_for_backward(as_rows(factor), *factors)
        ctx.set_materialize_grads(False)
        ctx.of_x, ctx.of_weights = (x.shape, x.dtype), [weight.dtype for weight in weights]
        ctx.device_type = x.device.type
        # no output of a wide layer is a view of another tensor, so callers may overwrite the output
        return tuple(F.linear(factor, w) for w in factors)

    @staticmethod
    def backward(ctx, *dys):
        refuse_graph("linear layers that share an input")
        if torch.compiler.is_compiling():
            # under torch.compile enter no nested autocast context: its end would also end the model's own context
            return _Linears._gradients(ctx, dys)
        # compute in the forward's dtypes, even if the caller runs `backward` under autocast
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
    """Return Σ aᵢ bᵢ of matrices aᵢ `[T, N]` and bᵢ `[N, D]`, accumulated in one tensor."""
    total = torch.mm(a[0], b[0])
    for x, y in zip(a[1:], b[1:], strict=True):
        total.addmm_(x, y)
    return total


@torch.library.custom_op("tokenmix_core::sum_of_matmuls", mutates_args=())
def sum_of_matmuls_op(a: list[Tensor], b: list[Tensor]) -> Tensor:
    """`_sum_of_matmuls` as a custom operator: torch.compile would copy the partial sum before each addmm."""
    with torch.autocast(a[0].device.type, enabled=False):
        return _sum_of_matmuls(a, b)


@sum_of_matmuls_op.register_fake
def _(a, b):
    return a[0].new_empty(a[0].shape[0], b[0].shape[1])


def _matmul(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the matmul a b in `dtype`; for a float32 `dtype`, a 16-bit GEMM on a GPU returns its sums unrounded.

    Under torch.compile the sums are rounded to 16 bits, as in torch's layers.
    """
    if dtype == torch.float32 and has_float32_output(a) and not torch.compiler.is_compiling():
        return torch.mm(a, b, out_dtype=dtype)
    return torch.mm(a, b).to(dtype)


def is_plain_linear(layer: nn.Module) -> bool:
    """True if `layer` is a plain torch Linear without bias: multiplying by its weight is equivalent to calling it."""
    return is_plain(nn.Linear, layer) and layer.bias is None


def is_sharded_linear(layer: nn.Module) -> bool:
    """True if FSDP2 shards `layer`, which is otherwise a plain Linear without bias, with no hooks but FSDP2's."""
    hooks = len(layer._forward_pre_hooks), len(layer._forward_hooks), len(layer._backward_hooks)
    own = type(layer).__name__ == "FSDPLinear" and type(layer).__bases__[-1] is nn.Linear
    return own and hooks == (1, 1, 0) and layer.bias is None and "forward" not in layer.__dict__
