"""Explain which kernels of an operation run on this machine, and why, by the plans that the calls themselves use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tokenmix_core.ops.checks import bind_shapes
from tokenmix_core.ops.dispatch import GluonForm, kernels_of, resolve_impl

# shared memory of a block, in bytes, for each chip for which tests compile the portable kernels
CHIPS = {
    "sm_80": 166_912, "sm_86": 101_376, "sm_89": 101_376, "sm_90": 232_448, "sm_100": 232_448, "sm_120": 101_376,
    "gfx942": 65_536,
}  # fmt: skip
# the chips on which the packages' tests have run
RAN = ("sm_90",)
Tensors = Mapping[str, Tensor]
# the step name of operations whose implementation is not divided into steps
WHOLE = "all steps"


@dataclass(frozen=True)
class Explanation:
    """The kernels that run for a call, and why.

    Attributes:
        operation: the operation's name.
        impl: the implementation, named as in the argument `impl` of the operation.
        kernels: the implementation of each step of the forward and backward pass.
        why: the reason why this implementation runs, as a clause.
        call: the call's sizes, dtype and device, as text.
    """

    operation: str
    impl: str
    kernels: Mapping[str, str]
    why: str
    call: str

    def __str__(self) -> str:
        steps = "" if list(self.kernels) == [WHOLE] else "".join(f"\n  {x}: {y}" for x, y in self.kernels.items())
        return f"{self.operation}: {self.impl}, as {self.why} ({self.call}){steps}"


class Operation(NamedTuple):
    """An operation that `explain` describes.

    Attributes:
        function: the public function.
        tensors: shapes of the function's first arguments, by name, written as for `bind_shapes`.
        sizes: sizes of a typical call, by letter of these shapes.
        kernels: `kernels(tensors, impl)` returns the implementation of each step of a call, by the step's name; None if
            the operation has a single step.
        gluon: the operation's Gluon kernels, if it has any.
        limit: `limit(tensors)` returns why the Gluon kernels do not support the tensors' shapes, as a clause, or None.
        selects: whether `kernels` also selects the implementation; if not, it is called only if the reference does not
            run.
    """

    function: Callable
    tensors: Mapping[str, str]
    sizes: Mapping[str, int]
    kernels: Callable[[Tensors, str | None], Mapping[str, str]] | None = None
    gluon: GluonForm | None = None
    limit: Callable[[Tensors], str | None] = lambda tensors: None
    selects: bool = False

    def steps(self, tensors: Tensors, impl: str | None) -> Mapping[str, str]:
        """Return the implementation of each step of a call.

        The reference and operations without `kernels` have one step, `WHOLE`.
        """
        if self.kernels is None or not self.selects:
            found = resolve_impl(self.function.__name__, impl, next(iter(tensors.values())), self.gluon)
            if self.kernels is None or found == "reference":
                return {WHOLE: found or "triton"}
        return self.kernels(tensors, impl)


OPERATIONS: dict[str, Operation] = {}


def register_operation(
    function: Callable, tensors: Mapping[str, str], sizes: Mapping[str, int], **description: Any
) -> None:
    """Register an operation, an `Operation` with these fields, for `explain` and for the command `info`."""
    OPERATIONS[function.__name__] = Operation(function, tensors, sizes, **description)


def explain(
    operation: Callable | str,
    *tensors: Tensor,
    sizes: Mapping[str, int] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str | None = None,
    impl: str | None = None,
    chip: str | None = None,
) -> Explanation:
    """Say which implementation and kernels of an operation would run, and why; nothing is launched.

    Args:
        operation: the function, or its name.
        tensors: examples of the function's first arguments, in its order; none are needed.
        sizes: sizes by letter of the function's signature, such as `{"T": 512, "K": 64}`, for letters that `tensors`
            do not determine; by default these have typical sizes.
        dtype, device: used if there are no `tensors`; the default device is the first GPU, or the CPU without a GPU.
        impl: the argument `impl` of the function.
        chip: a chip such as "sm_89", for which to explain our kernels instead of for `device`; it need not be present.

    Raises:
        ValueError: an unknown operation, size, device or chip, both a device and a chip, tensors that do not fit, or
            an `impl` that does not run.
    """
    if chip is not None:
        if chip not in CHIPS:
            raise ValueError(f"explain: chip must be one of {', '.join(CHIPS)}, got {chip!r}")
        if device is not None:
            raise ValueError(f"explain: pass a chip or a device, got {chip} and {device}")
        tensors, device = tuple(x.to("meta") for x in tensors), "meta"
    name = operation if isinstance(operation, str) else getattr(operation, "__name__", repr(operation))
    if name not in OPERATIONS:
        raise ValueError(f"explain: operation must be one of {', '.join(OPERATIONS)}, got {name}")
    known = OPERATIONS[name]
    dims = dict(known.sizes) | dict(sizes or {})
    if unknown := dims.keys() - known.sizes.keys():
        raise ValueError(f"explain: {name} has sizes {', '.join(known.sizes)}, got {', '.join(sorted(unknown))}")
    given = dict(zip(known.tensors, tensors, strict=False))
    if given:
        found: dict[str, int] = {}
        bind_shapes(name, found, **{x: (tensor, known.tensors[x]) for x, tensor in given.items()})
        dims |= found
        dtype, device = tensors[0].dtype, tensors[0].device
    else:
        device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
            raise ValueError(f"explain: device {device} is not here: this machine has {torch.cuda.device_count()} GPUs")
    # expand one element to every shape, because only shapes, dtypes and devices are read
    one = torch.empty(1, dtype=dtype, device=device)
    x = {name: one.expand([dims[letter] for letter in spec.split()]) for name, spec in known.tensors.items()} | given

    where = _device(device) if chip is None else chip if chip in RAN else f"{chip}, where no test has run"
    with kernels_of(chip) if chip else nullcontext():
        ours = known.gluon is not None and known.gluon.limit(device, dtype) is None and known.limit(x) is None
        asked = impl or (("gluon" if ours else "triton") if chip else None)
        kernels = dict(known.steps(x, asked))
        forms = {form.split()[0] for form in kernels.values()}
        chosen = next((form for form in ("gluon", "triton") if form in forms), next(iter(forms)))
        why = _why(known, chosen, x, device, dtype, impl)
    call = " ".join(f"{letter}={size}" for letter, size in dims.items())
    return Explanation(name, chosen, kernels, why, f"{call}, {str(dtype).removeprefix('torch.')} on {where}")


def _why(known: Operation, chosen: str, x: Tensors, device: torch.device, dtype: torch.dtype, impl: str | None) -> str:
    if impl is not None:
        return "asked for"
    if chosen == "reference":
        return "kernels need a CUDA device" if device.type != "cuda" else "kernels do not support such heads or dtypes"
    if chosen not in ("gluon", "triton"):
        return "the fastest library for it here"
    triton = f"Triton {_version('triton')}"
    if chosen == "gluon":
        return f"the device is a Hopper GPU, with {triton}"
    if known.gluon is None:
        return f"there are no other kernels, with {triton}"
    why = known.gluon.limit(device, dtype) or known.limit(x) or known.gluon.failure
    return f"Gluon, {known.gluon.slower.replace('slower', 'faster')}, {why or 'has none for such a call'}"


def _device(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "that is not installed"
