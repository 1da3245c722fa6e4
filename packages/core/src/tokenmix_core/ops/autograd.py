"""Turn functions of tensors into torch operators with gradients; in eager mode they run through the launch cache."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any, get_type_hints

import torch
from torch.autograd.graph import increment_version

from tokenmix_core.kernels.launch import compat
from tokenmix_core.kernels.launch.cache.capture import is_plain
from tokenmix_core.kernels.launch.cache.replay import Replayed
from tokenmix_core.kernels.launch.cache.row_calls import RowCall
from tokenmix_core.ops.dispatch import GLUON_ERRORS, give_up
from tokenmix_core.ops.transforms import Context, is_reference, refuse_graph, refuse_writes, transformable

# the type of device for which calls go through the launch cache
_LAUNCHED_ON = "cuda"


def cached_op(name: str, run: Callable, fake: Callable | None = None, *, mutates_args: Iterable[str] = ()) -> Any:
    """Return `run` as a torch custom op whose calls on a GPU go through the launch cache.

    Code that torch.compile generates calls the op as an operator, so compiled calls use the launch cache too. On a GPU
    a call runs again, with portable kernels, if one of its Gluon kernels does not compile.

    Args:
        name: the op's name with its library, such as "tokenmix_core::attention".
        run: the implementation, a function with annotated parameters or a function that `of_fields` has made.
        fake: returns uninitialised outputs; it takes the arguments of `run` or, if `of_fields` made `run`, the
            NamedTuple.
        mutates_args: the names of the tensors that `run` overwrites.
    """
    op = torch.library.custom_op(name, run, mutates_args=mutates_args)
    if fake is not None:
        step = getattr(inspect.unwrap(run), "step", None)
        op.register_fake(fake if step is None else of_fields(fake, step))
    replayed = retried(Replayed(run))
    defaults = [x.default for x in inspect.signature(run).parameters.values()]

    @op.register_kernel(_LAUNCHED_ON)
    def call(*inputs):
        if not is_plain(next(x for x in inputs if x is not None)):
            return run(*inputs)
        # torch drops trailing arguments equal to their defaults; restore them
        return replayed(*inputs, *defaults[len(inputs) :])

    return op


def of_fields(run: Callable, step: Any = None) -> Callable:
    """Turn `run(step)`, a function of a NamedTuple, into a function of its fields, as torch and `Replayed` require.

    The new function's parameters have the fields' names, types and defaults. If `run` returns a NamedTuple, the new
    function returns a plain tuple.
    A field that is itself a NamedTuple is replaced by its fields, in the arguments and in the result. The type of the
    NamedTuple is `step`, or else the annotation of the parameter of `run`.

    Raises:
        ValueError: two fields share a name, or a field without a default follows one with a default.
    """
    types = get_type_hints(run)
    returned = types.pop("return", inspect.Signature.empty)
    if step is None:
        (step,) = types.values()
    if returned is type(None):
        # torch's schema needs the annotation None; `get_type_hints` returns NoneType for it
        returned = None
    elif hasattr(returned, "_fields"):
        returned = tuple[tuple(x.annotation for x in _flat(returned))]  # type: ignore[misc]
    signature = inspect.Signature(list(_flat(step)), return_annotation=returned)
    made = _made(step)

    def call(*inputs, **named):
        if named:
            bound = signature.bind(*inputs, **named)
            bound.apply_defaults()
            inputs = bound.args
        output = run(made(*inputs))
        return _leaves(output) if hasattr(output, "_fields") else output

    vars(call).update(__signature__=signature, step=step)
    call.__name__, call.__doc__ = run.__name__, run.__doc__
    return call


def _flat(step: Any) -> Iterator[inspect.Parameter]:
    """Yield the fields of a NamedTuple as parameters; a nested NamedTuple is replaced by its fields."""
    for name, x in get_type_hints(step).items():
        if hasattr(x, "_fields"):
            yield from _flat(x)
        else:
            default = step._field_defaults.get(name, inspect.Parameter.empty)
            yield inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=x)


def _made(step: Any) -> Callable:
    """Return a function that builds the NamedTuple `step` from its fields as `_flat` orders them."""
    parts, first = [], 0
    for x in get_type_hints(step).values():
        end = first + (len(list(_flat(x))) if hasattr(x, "_fields") else 1)
        if hasattr(x, "_fields"):
            parts.insert(0, (first, end, _made(x)))
        first = end

    def made(*fields):
        # build nested tuples from last to first, so that the indices of the fields before them stay valid
        for first, end, part in parts:
            fields = *fields[:first], part(*fields[first:end]), *fields[end:]
        return step(*fields)

    return made if parts else step


def _leaves(step: Any) -> tuple:
    """Return a NamedTuple's values in the order of `_flat`; a nested tuple is replaced by its values."""
    return tuple([leaf for x in step for leaf in (_leaves(x) if isinstance(x, tuple) else (x,))])


def direct_when_eager(op: Callable, run: Callable, *, writes: int | None = None) -> Callable:
    """Return a function that calls `op`, a torch custom op, under tracing and `run`, its implementation, in eager mode.

    A call of a custom op through torch's dispatcher takes more CPU time than a kernel launch.

    Args:
        op, run: functions of the same arguments, the first of which is a tensor.
        writes: index of the tensor argument that both functions overwrite, or None. Its version counter is increased,
            so that autograd notices the change.
    """
    by_torch, plain = is_reference(run), run
    transformed = transformable(_name(op), run, None, _no_gradients)
    run = Replayed(run)

    def call(*inputs):
        if compat.in_transform():
            if writes is not None:
                refuse_writes(_name(op))
            return plain(*inputs) if by_torch(inputs) else transformed(*inputs)
        if not is_plain(inputs[0]):
            return op(*inputs)
        if writes is not None:
            increment_version(inputs[writes])
        try:
            return run(*inputs)
        except GLUON_ERRORS as error:
            give_up(error)
            return call(*inputs)

    return call


def retried(run: Callable) -> Callable:
    """Wrap `run`: if one of its Gluon kernels does not compile, call `run` again, which then uses portable kernels."""

    @functools.wraps(run, updated=())
    def call(*inputs, **options):
        try:
            return run(*inputs, **options)
        except GLUON_ERRORS as error:
            give_up(error)
            return call(*inputs, **options)

    return call


def differentiable(
    op: Callable,
    run: Callable,
    save: Callable,
    gradients: Callable,
    *,
    outputs: int | None = None,
    keep: Callable | None = None,
) -> Callable:
    """Return `op` with gradients: as a torch custom op under tracing, as an autograd function around `run` if eager.

    Args:
        op: a torch custom op; its gradient is registered here.
        run: the implementation of `op`. The first argument of both is a tensor.
        save: `save(ctx, inputs, output)` saves the tensors that `gradients` needs.
        gradients: `gradients(ctx, *output_gradients)` returns a gradient or None for each input.
        outputs: the number of outputs that are returned and differentiated; None for all. The others are saved for the
            backward pass alone.
        keep: replaces `run` in eager mode if gradients may be needed; it may return other tensors for `save`.
    """
    op.register_autograd(gradients, setup_context=save)
    by_torch, plain = is_reference(run), run
    with_transforms = transformable(_name(op), op, save, gradients, plain)
    run = Replayed(run)
    keep = run if keep is None else Replayed(keep)

    def foresee(inputs, output):
        # compile the kernels of the likely backward call now: usually only the first result has a gradient
        ctx = Context(inputs)
        save(ctx, inputs, output)
        gradients(ctx, torch.empty_like(output[0]), *[None] * (len(output[:outputs]) - 1))

    class Eager(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *inputs):
            *inputs, found = inputs
            if found is None:
                output = keep.miss(inputs, foresee if any(ctx.needs_input_grad) else None)
            else:
                call, stream, tensors, pointers = found
                output = call(stream, tensors, pointers)
            save(ctx, inputs, output)
            return output if outputs is None else output[:outputs]

        @staticmethod
        def backward(ctx, *output_gradients):
            if torch.is_grad_enabled():
                refuse_graph(_name(op))
            return *gradients(ctx, *output_gradients), None

    # skip torch's check for function transforms (vmap, grad): `apply` gets only calls that the launch cache matches,
    # and it never matches tensors that a transform wraps
    apply = compat.direct_apply(Eager)

    def transformed(*inputs):
        return plain(*inputs) if by_torch(inputs) and compat.in_transform() else with_transforms(*inputs)

    def call(*inputs):
        if not is_plain(inputs[0]):
            output = transformed(*inputs) if compat.in_transform() else op(*inputs)
            return output if outputs is None else output[:outputs]
        try:
            if not torch.is_grad_enabled() and not compat.transformed():
                output = run(*inputs)
                return output if outputs is None else output[:outputs]
            for match in keep.recent:
                found = match(*inputs)
                if found is not None:
                    return apply(*inputs, found)
            if by_torch(inputs) or compat.in_transform():
                output = transformed(*inputs)
                return output if outputs is None else output[:outputs]
            # call `apply` even if no input requires gradients: it raises an error for forward-mode derivatives
            return Eager.apply(*inputs, None)
        except GLUON_ERRORS as error:
            give_up(error)
            return call(*inputs)

    return call


def eager_function(
    op: str,
    run: Callable,
    save: Callable,
    gradients: Callable,
    by_rows: RowCall | None = None,
    *,
    cached: bool = True,
) -> Callable:
    """Return `run` with gradients, for eager mode only: torch.compile fuses the reference, which is then faster.

    `run` returns a tensor or a tuple and goes through the launch cache; the other arguments are as in `differentiable`.
    `op` is the operation's name. With `by_rows` one capture serves all batch sizes and lengths. `cached` is False if
    `run` itself calls functions that go through the launch cache.
    """
    transformed = transformable(op, run, save, gradients)
    if cached:
        run = Replayed(run, by_rows)

    class Eager(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *inputs):
            output = run(*inputs)
            save(ctx, inputs, output)
            return output

        @staticmethod
        def backward(ctx, *output_gradients):
            refuse_graph(op)
            return gradients(ctx, *output_gradients)

    apply = compat.direct_apply(Eager)

    def call(*inputs):
        if compat.in_transform():
            return transformed(*inputs)
        return apply(*inputs) if torch.is_grad_enabled() else run(*inputs)

    return call


def _name(op: Any) -> str:
    """Return the name of a custom op without the name of its library."""
    return op._qualname.partition("::")[2]


def _no_gradients(*_: Any) -> Any:
    raise AssertionError("a call without gradients has no backward pass")
