"""Export eager references as single operators: torch.export would unroll their loops, which fixes the length."""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from tokenmix_core.kernels.launch.compat import constant_when_traced

_REFERENCES: dict[str, tuple[Callable, Callable]] = {}


@torch.library.custom_op("tokenmix::reference", mutates_args=())
def _reference(name: str, tensors: Sequence[Tensor], names: str, options: str) -> list[Tensor]:
    found = _called(_REFERENCES[name][0], tensors, names, options)
    return [x.clone(memory_format=torch.contiguous_format) for x in found]


@_reference.register_fake
def _(name, tensors, names, options):
    return list(_called(_REFERENCES[name][1], tensors, names, options))


def _called(run: Callable, tensors: Sequence[Tensor], names: str, options: str) -> tuple:
    """Call `run` with `tensors` as the arguments `names`, separated by blanks, and with `options`, a dict as text."""
    return run(**dict(zip(names.split(), tensors, strict=True)), **ast.literal_eval(options))


@constant_when_traced
def is_exporting() -> bool:
    """True under torch.export, False under torch.compile, which would trace torch 2.11's own function as True."""
    return torch.compiler.is_exporting()  # noqa: TID251


def scan_shapes(
    q: Tensor, v: Tensor, cu_seqlens: Tensor | None = None, **_: object
) -> tuple[Float[Tensor, "B T HV V"], Float[Tensor, "N HV K V"]]:
    """Return uninitialised tensors that have the shapes and dtypes of a scan's outputs and final states."""
    N = q.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    dtype = torch.promote_types(q.dtype, torch.float32)
    return torch.empty_like(v), q.new_empty(N, v.shape[2], q.shape[3], v.shape[3], dtype=dtype)


def exportable(run: Callable, shapes: Callable) -> Callable:
    """Wrap `run`, a function that returns several tensors, so that torch.export sees each call as one operator.

    The operator has no gradient. A process that loads the exported program must import the module that defines `run`.

    Args:
        run: the function; its arguments are tensors, literals such as numbers, or None. None is omitted.
        shapes: a function of the same arguments that returns uninitialised tensors of the results' shapes and dtypes.
    """
    name, parameters = f"{run.__module__}.{run.__qualname__}", [*inspect.signature(run).parameters]
    _REFERENCES[name] = run, shapes

    @functools.wraps(run)
    def call(*args, **named):
        if not is_exporting():
            return run(*args, **named)
        # torch.export's strict mode traces the next lines, so they use only simple Python
        named = {**dict(zip(parameters, args, strict=False)), **named}
        tensors = {n: x for n, x in named.items() if isinstance(x, Tensor)}
        options = [f"{n!r}: {x!r}" for n, x in named.items() if n not in tensors and x is not None]
        return tuple(_reference(name, list(tensors.values()), " ".join(tensors), "{" + ", ".join(options) + "}"))

    return call
