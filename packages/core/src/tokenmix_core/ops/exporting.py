"""References as single operators in the graphs of torch.export, where their loops over chunks would fix the length."""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

_REFERENCES: dict[str, tuple[Callable, Callable]] = {}


@torch.library.custom_op("tokenmix::reference", mutates_args=())
def _reference(name: str, tensors: Sequence[Tensor], names: str, options: str) -> list[Tensor]:
    found = _called(_REFERENCES[name][0], tensors, names, options)
    return [x.clone(memory_format=torch.contiguous_format) for x in found]


@_reference.register_fake
def _(name, tensors, names, options):
    return list(_called(_REFERENCES[name][1], tensors, names, options))


def _called(run: Callable, tensors: Sequence[Tensor], names: str, options: str) -> tuple:
    """Call a function with tensors by name, and with its other arguments, given as the text of a dictionary."""
    return run(**dict(zip(names.split(), tensors, strict=True)), **ast.literal_eval(options))


def scan_shapes(
    q: Tensor, v: Tensor, cu_seqlens: Tensor | None = None, **_: object
) -> tuple[Float[Tensor, "B T HV V"], Float[Tensor, "N HV K V"]]:
    """Return empty outputs and final states of a scan."""
    N = q.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    dtype = torch.promote_types(q.dtype, torch.float32)
    return torch.empty_like(v), q.new_empty(N, v.shape[2], q.shape[3], v.shape[3], dtype=dtype)


def exportable(run: Callable, shapes: Callable) -> Callable:
    """Return `run`, a function that returns several tensors, as one operator of torch.export.

    The operator has no gradient. A program that is loaded elsewhere needs an import of the module that defines `run`.

    Args:
        run: the function; None arguments are left out.
        shapes: returns empty results for the same arguments.
    """
    name, parameters = f"{run.__module__}.{run.__qualname__}", [*inspect.signature(run).parameters]
    _REFERENCES[name] = run, shapes

    @functools.wraps(run)
    def call(*args, **named):
        if not torch.compiler.is_exporting():
            return run(*args, **named)
        # plain code, which strict mode traces
        named = {**dict(zip(parameters, args, strict=False)), **named}
        tensors = {n: x for n, x in named.items() if isinstance(x, Tensor)}
        options = [f"{n!r}: {x!r}" for n, x in named.items() if n not in tensors and x is not None]
        return tuple(_reference(name, list(tensors.values()), " ".join(tensors), "{" + ", ".join(options) + "}"))

    return call
