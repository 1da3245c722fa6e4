"""Common parts of all operations: return types, the choice of an implementation, and checks of arguments."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, NoReturn, get_args, get_type_hints

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from tokenmix_core.kernels.launch import compat
from tokenmix_core.kernels.launch.cache.codegen import next_part
from tokenmix_core.kernels.launch.cache.replay import Replayed, is_plain, is_real
from tokenmix_core.ops.dispatch import NOT_TO_BE_HAD, GluonForm, give_up

Impl = Literal["gluon", "triton", "reference"]

# a tensor's shape and dtype
Layout = tuple[tuple[int, ...], torch.dtype]


class ScanOutput(NamedTuple):
    """The result of a recurrence.

    Attributes:
        o: outputs, `[B, T, HV, V]`.
        final_state: the state after the last token of each sequence, float32, `[N, HV, K, V]`.
    """

    o: Tensor
    final_state: Tensor


class AttentionOutput(NamedTuple):
    """The result of attention.

    Attributes:
        o: outputs, `[B, T, HQ, V]`.
        lse: natural log of the sum of exponentials of the scores, `[B, T, HQ]`, float32; −∞ where no key is seen.
    """

    o: Tensor
    lse: Tensor


def interpreting() -> bool:
    """Tell whether Triton kernels run in Triton's interpreter (`TRITON_INTERPRET=1`)."""
    import os

    return os.environ.get("TRITON_INTERPRET", "0") == "1"


# where kernels are launched
_LAUNCHED_ON = "cuda"


def recorded_op(name: str, run: Callable | None = None, *, mutates_args: Iterable[str]) -> Any:
    """`torch.library.custom_op` of `run`, or a decorator, whose calls on a GPU are recorded, too.

    What torch compiles calls the op with plain tensors, which is then as quick as a call in eager mode.
    """
    if run is None:
        return lambda run: recorded_op(name, run, mutates_args=mutates_args)
    op = torch.library.custom_op(name, run, mutates_args=mutates_args)
    replayed = retried(Replayed(run))
    defaults = [x.default for x in inspect.signature(run).parameters.values()]

    @op.register_kernel(_LAUNCHED_ON)
    def call(*inputs):
        if not is_plain(next(x for x in inputs if x is not None)):
            return run(*inputs)
        # torch leaves out what is as by default at the end
        return replayed(*inputs, *defaults[len(inputs) :])

    return op


def of_fields(run: Callable) -> Callable:
    """`run(step)`, of a NamedTuple, as a function of the fields one by one, as torch and `Replayed` take tensors.

    It has the fields' names, types and defaults, and returns what `run` does, of a NamedTuple a plain tuple. A field
    that is itself a NamedTuple is replaced by its fields, given and returned.

    Raises:
        ValueError: fields of one name, or one without a default after one with a default.
    """
    types = get_type_hints(run)
    returned = types.pop("return", inspect.Signature.empty)
    (step,) = types.values()
    if returned is type(None):
        # as torch spells it
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

    vars(call)["__signature__"] = signature
    call.__name__, call.__doc__ = run.__name__, run.__doc__
    return call


def _flat(step: Any) -> Iterator[inspect.Parameter]:
    """The fields of a NamedTuple; one that is itself a NamedTuple is replaced by its fields."""
    for name, x in get_type_hints(step).items():
        if hasattr(x, "_fields"):
            yield from _flat(x)
        else:
            default = step._field_defaults.get(name, inspect.Parameter.empty)
            yield inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=x)


def _made(step: Any) -> Callable:
    """`step` as a function of its `_flat` fields."""
    parts, first = [], 0
    for x in get_type_hints(step).values():
        end = first + (len(list(_flat(x))) if hasattr(x, "_fields") else 1)
        if hasattr(x, "_fields"):
            parts.insert(0, (first, end, _made(x)))
        first = end

    def made(*fields):
        # from the last, so that the others stay in their places
        for first, end, part in parts:
            fields = *fields[:first], part(*fields[first:end]), *fields[end:]
        return step(*fields)

    return made if parts else step


def _leaves(step: Any) -> tuple:
    """The values of a NamedTuple's `_flat` fields."""
    return tuple([leaf for x in step for leaf in (_leaves(x) if isinstance(x, tuple) else (x,))])


def direct_when_eager(op: Callable, run: Callable, *, writes: int | None = None) -> Callable:
    """`op`, a torch custom op, where torch traces; `run`, the function behind it, in eager mode.

    A custom op's way through torch's dispatcher takes more host time than the launch of a kernel. The first argument of
    both is a tensor, and the one at `writes` is written to: who saved it for a backward pass will be told.
    """
    run = Replayed(run)

    def call(*inputs):
        if not is_plain(inputs[0]):
            return op(*inputs)
        if writes is not None:
            increment_version(inputs[writes])
        try:
            return run(*inputs)
        except NOT_TO_BE_HAD as error:
            give_up(error)
            return call(*inputs)

    return call


def retried(run: Callable) -> Callable:
    """`run`, made once more, by portable kernels, where one of its kernels in Gluon is not to be had."""

    @functools.wraps(run, updated=())
    def call(*inputs, **options):
        try:
            return run(*inputs, **options)
        except NOT_TO_BE_HAD as error:
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
    """The same, with gradients by one pair of functions: the op's, and those of an autograd function around `run`.

    Args:
        op: a torch custom op; its gradient is registered here.
        run: what it runs. The first argument of both is a tensor.
        save: `(ctx, inputs, output)`, keeps what `gradients` needs.
        gradients: `(ctx, *output_gradients)`, a gradient or None for each input.
        outputs: how many of the outputs are results, passed on and differentiated; None for all. The others are kept
            for the backward pass alone.
        keep: what runs in place of `run` in eager mode where gradients may be asked for, with other things kept.
    """
    op.register_autograd(gradients, setup_context=save)
    run = Replayed(run)
    keep = run if keep is None else Replayed(keep)

    def foresee(inputs, output):
        # the gradient of the first result alone: what most calls are for
        ctx = _Rehearsed(inputs)
        save(ctx, inputs, output)
        gradients(ctx, torch.empty_like(output[0]), *[None] * (len(output[:outputs]) - 1))

    class Eager(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *inputs):
            *inputs, found = inputs
            if found is None:
                output = keep.anew(inputs, foresee if any(ctx.needs_input_grad) else None)
            else:
                call, stream, tensors, pointers = found
                output = call(stream, tensors, pointers)
            save(ctx, inputs, output)
            return output if outputs is None else output[:outputs]

        @staticmethod
        def backward(ctx, *output_gradients):
            if torch.is_grad_enabled():
                refuse_graph()
            return *gradients(ctx, *output_gradients), None

    # what transforms of functions wrap matches nothing
    apply = compat.direct_apply(Eager)

    def call(*inputs):
        if not is_plain(inputs[0]):
            output = op(*inputs)
            return output if outputs is None else output[:outputs]
        try:
            if not torch.is_grad_enabled() and not compat.forward_mode():
                output = run(*inputs)
                return output if outputs is None else output[:outputs]
            for match in keep.recent:
                found = match(*inputs)
                if found is not None:
                    return apply(*inputs, found)
            # torch says that forward-mode derivatives are not available, also where it records nothing
            return Eager.apply(*inputs, None)
        except NOT_TO_BE_HAD as error:
            give_up(error)
            return call(*inputs)

    return call


def eager_function(run: Callable, save: Callable, gradients: Callable) -> Callable:
    """`run` with gradients, in eager mode alone: for what torch.compile is better given in its plain form, to fuse.

    Args, and what is recorded, are as in `differentiable`; `run` returns a tensor or a tuple.
    """
    run = Replayed(run)

    class Eager(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *inputs):
            output = run(*inputs)
            save(ctx, inputs, output)
            return output

        @staticmethod
        def backward(ctx, *output_gradients):
            refuse_graph()
            return gradients(ctx, *output_gradients)

    apply = compat.direct_apply(Eager)
    return lambda *inputs: apply(*inputs) if torch.is_grad_enabled() else run(*inputs)


def row_impl(op: str, impl: str | None, x: Tensor) -> str:
    """The implementation of what works row by row between matrix products: "triton" or "reference".

    None is Triton for CUDA tensors in eager mode. Where torch traces, or operations are watched, it is the reference,
    also if Triton was asked for: compilers fuse it with its neighbours.

    Raises:
        ValueError: as `resolve_impl`.
    """
    found = resolve_impl(op, impl, x)
    return "reference" if found == "reference" or x.dtype == torch.float64 or not is_plain(x) else "triton"


def as_rows(x: Tensor) -> Tensor:
    """x `[*, D]` as `[tokens, D]`, itself where tokens lie at one stride with elements side by side, as in a slice."""
    try:
        rows = x.view(-1, x.shape[-1])
    except RuntimeError:
        rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()


def refuse_graph() -> None:
    """Raise a RuntimeError in a backward pass that is itself recorded: what kernels make would pass for constants.

    Torch's `once_differentiable` raises one only where the gradients that arrive are no constants themselves.
    """
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError(
            "gradients of gradients are not available: call backward without create_graph=True "
            "(only operations with impl='reference' have them)"
        )


def parts_of(whole: Tensor, layouts: Iterable[Layout]) -> list[Tensor]:
    """Tensors of these shapes and dtypes, one after the other in `whole`, bytes: a tensor to keep in place of many."""
    start, parts = 0, []
    for shape, dtype in layouts:
        end = start + math.prod(shape) * dtype.itemsize
        parts.append(whole[start:end].view(dtype).view(shape))
        start = next_part(end)
    return parts


def room_for(layouts: Iterable[Layout]) -> int:
    """How many bytes `parts_of` takes."""
    return sum(next_part(math.prod(shape) * dtype.itemsize) for shape, dtype in layouts)


def aligned(x: Tensor | None) -> Any:
    """x where it is contiguous and begins at a multiple of 16 bytes, which a slice may not, else such a copy.

    Copies into shared memory take 16 bytes at a time, and for other addresses kernels would be compiled anew.
    """
    if x is None or (x.is_contiguous() and (not is_real(x) or x.data_ptr() % 16 == 0)):
        return x
    return x.clone(memory_format=torch.contiguous_format)


class _Rehearsed:
    """The parts of a call that an autograd function keeps, outside of autograd."""

    def __init__(self, inputs: Sequence) -> None:
        self.needs_input_grad = [isinstance(x, Tensor) for x in inputs]
        self.saved_tensors: tuple[Tensor | None, ...] = ()

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self.saved_tensors = tensors

    def set_materialize_grads(self, value: bool) -> None:
        """No gradients are made here."""


def resolve_impl(op: str, impl: str | None, x: Tensor, gluon: GluonForm | None = None) -> str | None:
    """The implementation asked for, or, where None is, the eager reference for tensors on a CPU.

    None stays None for CUDA tensors: the operation's kernels, those in Gluon wherever they run.

    Args:
        gluon: the operation's kernels in Gluon, if it has any.

    Raises:
        ValueError: an unknown name, "gluon" where there are no such kernels, or "triton" for tensors on a CPU outside
            Triton's interpreter.
    """
    if impl is None:
        return None if x.is_cuda else "reference"
    if impl not in get_args(Impl):
        raise ValueError(f"{op}: impl must be None or one of {', '.join(map(repr, get_args(Impl)))}, got {impl!r}")
    if impl == "gluon":
        if gluon is None:
            raise ValueError(f"{op}: impl='gluon' is not there, as it has no kernels in Gluon; pass impl='triton'")
        gluon.require(op, x.device, x.dtype)
    if impl == "triton" and not x.is_cuda and not interpreting():
        raise ValueError(
            f"{op}: impl='triton' needs CUDA tensors, got tensors on {x.device}; "
            "pass impl='reference', or set TRITON_INTERPRET=1 to run the kernels on a CPU"
        )
    return impl


def unless_gluon(impl: Any) -> Any:
    """`impl`, or None, the fastest, for "gluon": what a module asks of an operation that may have no such kernels."""
    return None if impl == "gluon" else impl


def bind_shapes(op: str, dims: dict[str, int], **specs: tuple[Tensor | None, str]) -> dict[str, int]:
    """Match tensors with shapes such as `"B T H K"`: a letter binds at first sight, a number stands for itself.

    All tensors must lie on the device of the first one. A specification that ends in `?` allows None.

    Args:
        op: the name to begin error messages with.
        dims: letters bound so far; extended in place and returned.
        specs: by argument name, the tensor and its specification.

    Raises:
        ValueError: what was got and what was expected.
    """
    first, device = "", None
    # torch.compile warns of every cache that it walks past
    letters_of = _split if torch.compiler.is_compiling() else _letters
    for name, (x, spec) in specs.items():
        if x is None and spec.endswith("?"):
            continue
        spec = spec.removesuffix("?")
        if not isinstance(x, Tensor):
            got = "None" if x is None else type(x).__name__
            raise ValueError(f"{op}: {name} must be a tensor of shape [{spec.replace(' ', ', ')}], got {got}")
        letters, shape = letters_of(spec), x.shape
        ok = len(shape) == len(letters)
        if ok:
            for letter, size in zip(letters, shape, strict=True):
                if (letter if letter.__class__ is int else dims.setdefault(letter, size)) != size:
                    ok = False
        if not ok:
            letters = spec.split()
            bound = ", ".join(f"{k}={v}" for k, v in dims.items() if k in letters)
            wanted = f"[{', '.join(letters)}]" + (f" with {bound}" if bound else "")
            raise ValueError(f"{op}: {name} must have shape {wanted}, got {list(shape)}")
        if device is None:
            first, device = name, x.device
        elif x.device != device:
            _refuse_devices(op, (first, device), (name, x.device))
    return dims


def check_same_device(op: str, **tensors: Tensor | None) -> None:
    """Raise a ValueError unless all tensors lie on one device."""
    (first, device), *others = [(name, x.device) for name, x in tensors.items() if x is not None]
    for name, other in others:
        if other != device:
            _refuse_devices(op, (first, device), (name, other))


def _refuse_devices(op: str, first: tuple[str, torch.device], other: tuple[str, torch.device]) -> NoReturn:
    # of two tensors, one on the meta device is the one whose values are missing
    (_, wanted), (name, found) = sorted((first, other), key=lambda x: x[1].type == "meta")
    raise ValueError(f"{op}: {name} is on {found}, expected {wanted} like the other tensors")


def _split(spec: str) -> tuple[str | int, ...]:
    return tuple(int(letter) if letter.isdigit() else letter for letter in spec.split())


_letters = functools.cache(_split)


def check_scale(op: str, scale: object) -> float:
    """The scale as a float; a ValueError for what is no finite number."""
    try:
        number = float(scale)  # type: ignore[arg-type]
        if torch.compiler.is_compiling():
            # it may be a number that is not known yet
            return number
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{op}: scale must be a finite number, got {scale!r}")
    return number


def check_tensors(op: str, **tensors: object) -> None:
    """Raise a ValueError for what is no tensor."""
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            raise ValueError(f"{op}: {name} must be a tensor, got {'None' if x is None else type(x).__name__}")


def check_dtype(op: str, allowed: tuple[torch.dtype, ...], **tensors: Tensor | None) -> None:
    """Raise a ValueError for a tensor whose dtype is not one of `allowed`."""
    for name, x in tensors.items():
        if x is not None and x.dtype not in allowed:
            names = ", ".join(str(d).removeprefix("torch.") for d in allowed)
            raise ValueError(f"{op}: {name} must be {names}, got {str(x.dtype).removeprefix('torch.')}")


def check_same_dtype(op: str, **tensors: Tensor | None) -> None:
    """Raise a ValueError unless all tensors share one dtype."""
    present = {name: x.dtype for name, x in tensors.items() if x is not None}
    if len(set(present.values())) > 1:
        got = ", ".join(f"{name} {str(d).removeprefix('torch.')}" for name, d in present.items())
        raise ValueError(f"{op}: {', '.join(present)} must share one dtype, got {got}")


def check_multiple(op: str, name: str, size: int, of: str, divisor: int) -> None:
    """Raise a ValueError unless `size` is a multiple of `divisor`."""
    if divisor <= 0 or size % divisor:
        raise ValueError(f"{op}: {name} must be a multiple of {of}, got {name}={size} and {of}={divisor}")


def check_cu_seqlens(op: str, cu_seqlens: Tensor | None, batch: int, tokens: int) -> int | None:
    """Check the boundaries of a packed batch; return the number of sequences, None for an unpacked batch.

    Values are checked on a CPU only: reading them from a GPU would stall its stream.

    Raises:
        ValueError: what was got and what was expected.
    """
    if cu_seqlens is None:
        return None
    if not isinstance(cu_seqlens, Tensor):
        raise ValueError(f"{op}: cu_seqlens must be a tensor of shape [N + 1], got {type(cu_seqlens).__name__}")
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 2:
        raise ValueError(f"{op}: cu_seqlens must have shape [N + 1] with N ≥ 1, got {list(cu_seqlens.shape)}")
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{op}: cu_seqlens must be int32 or int64, got {str(cu_seqlens.dtype).removeprefix('torch.')}")
    if not cu_seqlens.is_contiguous():
        raise ValueError(f"{op}: cu_seqlens must be contiguous, got stride {cu_seqlens.stride(0)}")
    if batch != 1:
        raise ValueError(f"{op}: a packed batch has B = 1, got B = {batch} together with cu_seqlens")
    if not cu_seqlens.is_cuda and not torch.compiler.is_compiling():
        first, last = int(cu_seqlens[0]), int(cu_seqlens[-1])
        if first != 0 or last != tokens or bool((cu_seqlens.diff() < 0).any()):
            raise ValueError(
                f"{op}: cu_seqlens must rise from 0 to T = {tokens} without falling, got {cu_seqlens.tolist()[:16]}"
            )
    return cu_seqlens.numel() - 1
