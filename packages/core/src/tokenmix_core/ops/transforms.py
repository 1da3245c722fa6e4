"""Gradients of operations under `torch.func` transforms, and second derivatives of reference implementations."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
from torch import Tensor

from tokenmix_core.kernels.launch import compat


class Context:
    """A substitute for an autograd function's `ctx`: it stores the tensors and attributes that `save` sets."""

    def __init__(self, inputs: Sequence) -> None:
        self.needs_input_grad = [isinstance(x, Tensor) for x in inputs]
        self.saved_tensors: tuple[Tensor | None, ...] = ()
        self.materialize = True

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self.saved_tensors = tensors

    def set_materialize_grads(self, value: bool) -> None:
        self.materialize = value


def refuse_graph(op: str) -> None:
    """Raise a RuntimeError in a backward pass with create_graph=True, which would treat kernels' results as constants.

    torch's `once_differentiable` raises an error only if the incoming gradients require gradients themselves.
    """
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        refuse_second(op)


def refuse_second(op: str) -> NoReturn:
    """Raise a RuntimeError that says that the operation `op` has no second derivatives."""
    raise RuntimeError(
        f"{op}: gradients of gradients are not available: call backward without create_graph=True "
        "(only operations with impl='reference' have them)"
    )


def refuse_writes(op: str) -> None:
    """Raise a RuntimeError inside a function transform: it replaces the tensor that a kernel would overwrite."""
    if compat.in_transform():
        raise RuntimeError(
            f"{op}: torch.func's transforms do not support writes to a state; pass impl='reference' or call it outside"
        )


def is_reference(run: Callable) -> Callable[[Sequence], bool]:
    """Return a function that tells, from a list of arguments of `run`, whether the argument `impl` is "reference"."""
    names = [*inspect.signature(run).parameters]
    at = names.index("impl") if "impl" in names else None
    return lambda inputs: at is not None and inputs[at] == "reference"


def transformable(
    op: str, run: Callable, save: Callable | None, gradients: Callable, plain: Callable | None = None
) -> Callable:
    """Return `run` with gradients under `torch.func.grad` and `vmap`, which calls `run` once per example.

    Forward-mode derivatives raise an error. So do second derivatives, except those of a reference outside of
    transforms, for which torch differentiates `plain`.

    Args:
        op: the operation's name.
        run: a function of tensors and other values that returns a tensor or a sequence of tensors.
        save: `save(ctx, inputs, output)` saves the tensors that `gradients` needs; None if there are no gradients.
        gradients: `gradients(ctx, *output_gradients)` returns a gradient or None for each input.
        plain: a function like `run`, which torch can differentiate if the input `impl` is "reference"; None without
            one.
    """
    by_torch = (lambda inputs: False) if plain is None else is_reference(plain)

    def no_tangents(*_: Any) -> NoReturn:
        raise NotImplementedError(f"{op}: forward-mode AD is not available, only for impl='reference'")

    class Forward(torch.autograd.Function):
        jvp = staticmethod(no_tangents)

        @staticmethod
        def forward(*inputs):
            output = run(*inputs)
            return output if isinstance(output, Tensor) else tuple(output)

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.found = found = Context(inputs)
            if save is not None:
                save(found, inputs, output)
            again = inputs if by_torch(inputs) else ()
            ctx.rest = [None if isinstance(x, Tensor) else x for x in again]
            ctx.count = len(found.saved_tensors)
            ctx.save_for_backward(*found.saved_tensors, *(x if isinstance(x, Tensor) else None for x in again))
            ctx.set_materialize_grads(found.materialize)
            found.saved_tensors = ()

        @staticmethod
        def backward(ctx, *output_gradients):
            if save is None:
                raise RuntimeError(f"{op}: there are no gradients")
            tensors = ctx.saved_tensors
            if ctx.rest and torch.is_grad_enabled():
                inputs = [y if x is None else x for x, y in zip(tensors[ctx.count :], ctx.rest, strict=True)]
                return _by_torch(plain, inputs, output_gradients)
            ctx.found.needs_input_grad = ctx.needs_input_grad
            given = _Given(ctx.found, ctx.count)
            found = iter(Backward.apply(given, *tensors[: ctx.count], *output_gradients))  # type: ignore[arg-type]
            return tuple(next(found) if there else None for there in given.there)

        @staticmethod
        def vmap(info, in_dims, *inputs):
            return _one_by_one(Forward.apply, info, in_dims, inputs)

    class Backward(torch.autograd.Function):
        jvp = staticmethod(no_tangents)

        @staticmethod
        def forward(given, *tensors):
            context = SimpleNamespace(**vars(given.context) | {"saved_tensors": tensors[: given.count]})
            found = gradients(context, *tensors[given.count :])
            given.there = [x is not None for x in found]
            return tuple(x for x in found if x is not None)

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        @staticmethod
        def backward(ctx, *output_gradients):
            refuse_second(op)

        @staticmethod
        def vmap(info, in_dims, *inputs):
            return _one_by_one(Backward.apply, info, in_dims, inputs)

    return Forward.apply


class _Given:
    """The non-tensor arguments of a backward pass; `there` has for each input whether its gradient is not None."""

    def __init__(self, context: Context, count: int) -> None:
        self.context, self.count = context, count
        self.there: list[bool] = []


def _one_by_one(apply: Callable, info: Any, in_dims: tuple, inputs: tuple) -> tuple[Any, Any]:
    """Call `apply` once for each example of a vmapped batch, and stack the results along a new first axis."""
    found = [
        apply(*(x if dim is None else x.select(dim, i) for x, dim in zip(inputs, in_dims, strict=True)))
        for i in range(info.batch_size)
    ]
    if isinstance(found[0], Tensor):
        return torch.stack(found), 0
    stacked = tuple(None if x[0] is None else torch.stack(x) for x in zip(*found, strict=True))
    return stacked, tuple(None if x is None else 0 for x in stacked)


def _by_torch(run: Any, inputs: Sequence, output_gradients: Sequence) -> tuple[Tensor | None, ...]:
    """Compute the gradients of `run` by torch's autograd, so that they can be differentiated again."""
    # alias each input, so that a tensor that is passed twice gets a separate gradient for each argument
    inputs = [x.view_as(x) if isinstance(x, Tensor) else x for x in inputs]
    wanted = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]
    outputs = run(*inputs)
    outputs = [outputs] if isinstance(outputs, Tensor) else outputs
    pairs = [(y, g) for y, g in zip(outputs, output_gradients, strict=False) if g is not None and y.requires_grad]
    if not pairs:
        return (None,) * len(inputs)
    ends, starts = zip(*pairs, strict=True)
    found = iter(torch.autograd.grad(ends, wanted, starts, create_graph=True, allow_unused=True))
    return tuple(next(found) if isinstance(x, Tensor) and x.requires_grad else None for x in inputs)
