"""Memory layouts: tensors of equal shapes with different strides, offsets or storages; most have equal elements."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

Named = Mapping[str, Tensor]


class Layout(NamedTuple):
    """A memory layout for the arguments of a call and for the gradients of its outputs.

    Attributes:
        arguments: function that maps arguments with gradients, by name, to tensors in this layout.
        gradients: function that maps the gradients of outputs, by name, to tensors in this layout.
        others: function that maps arguments without gradients, by name, to tensors in this layout with equal elements.
        repeats: whether the layout changes elements, for example repeats some of them.
        alone: whether a CPU also tests gradients through the first output only.
    """

    arguments: Callable[[Named], dict[str, Tensor]]
    gradients: Callable[[Named], dict[str, Tensor]]
    others: Callable[[Named], dict[str, Tensor]] = dict
    repeats: bool = False
    alone: bool = False


def each(change: Callable[[Tensor], Tensor]) -> Callable[[Named], dict[str, Tensor]]:
    """Return a function that applies `change` to every tensor in a dict."""
    return lambda tensors: {name: change(x) for name, x in tensors.items()}


def copies(tensors: Named) -> dict[str, Tensor]:
    """Return contiguous copies of tensors."""
    return {name: x.clone(memory_format=torch.contiguous_format) for name, x in tensors.items()}


def laid_out(options: Mapping[str, Any], layout: Layout) -> dict[str, Any]:
    """Return the arguments that need no gradient, with the strides of `layout` for their tensors (in tuples too).

    `cu_seqlens` stays contiguous, as operations require.
    """
    found = dict(options)
    for name, x in options.items():
        parts = x if isinstance(x, tuple) else (x,)
        if all(isinstance(part, Tensor) for part in parts):
            made = layout.others({str(i): part for i, part in enumerate(parts)}).values()
            if name != "cu_seqlens" or all(part.is_contiguous() for part in made):
                found[name] = x.__class__(*made) if hasattr(x, "_fields") else (*made,) if parts is x else (*made,)[0]
    return found


def unwritten(x: Tensor, size: Iterable[int]) -> Tensor:
    """Return a tensor of this size, with x's dtype and device, filled with NaN, True or the greatest integer.

    Results then show whether its elements are read.
    """
    greatest: Any = torch.nan if x.is_floating_point() else True if x.dtype == torch.bool else torch.iinfo(x.dtype).max
    return x.new_full(tuple(size), greatest)


def transposed(x: Tensor) -> Tensor:
    """Return x with two axes exchanged in memory: the second and third, or a matrix's two; for a vector `offset(x)`."""
    if x.dim() < 2:
        return offset(x)
    axes = (0, 1) if x.dim() == 2 else (1, 2)
    return x.transpose(*axes).contiguous().transpose(*axes)


def columns_first(x: Tensor) -> Tensor:
    """Return x with the order of all its axes reversed in memory."""
    axes = tuple(reversed(range(x.dim())))
    return x.permute(axes).contiguous().permute(axes)


def strided(x: Tensor) -> Tensor:
    """Return x stored as every second element of longer rows."""
    if not x.dim():
        return x
    wide = unwritten(x, (*x.shape[:-1], 2 * x.shape[-1]))[..., ::2]
    return wide.copy_(x)


def sliced(x: Tensor) -> Tensor:
    """Return x stored as a slice of a larger tensor, which has more and longer rows."""
    if not x.dim():
        return x
    wide = unwritten(x, (n + 1 for n in x.shape))
    return wide[1:][tuple(slice(n) for n in x.shape)].copy_(x)


def offset(x: Tensor) -> Tensor:
    """Return x, contiguous, but starting one element after an aligned address."""
    return unwritten(x, (x.numel() + 1,))[1:].view(x.shape).copy_(x)


def expanded(*axes: int) -> Callable[[Tensor], Tensor]:
    """Return a function that repeats a tensor's first element along the given axes, by strides of 0."""

    def expand(x: Tensor) -> Tensor:
        first = x
        for axis in axes:
            if axis < x.dim():
                first = first.narrow(axis, 0, min(1, x.shape[axis]))
        return first.contiguous().expand(x.shape)

    return expand


def repeated_rows_and_heads(tensors: Named) -> dict[str, Tensor]:
    """Repeat each tensor's first element by strides of 0: along the first axis, or along the third axis (heads).

    The latter holds for every second tensor, if it has three axes.
    """
    changes = (expanded(0), expanded(2))
    return {name: changes[i % 2 and x.dim() > 2](x) for i, (name, x) in enumerate(tensors.items())}


def of_a_sum(x: Tensor) -> Tensor:
    """Return x's first element, repeated along all axes by strides of 0, which is the layout of a sum's gradient."""
    return x.flatten()[:1].clone().view((1,) * x.dim()).expand(x.shape)


def in_one_storage(tensors: Named) -> dict[str, Tensor]:
    """Return tensors of one dtype as slices of one storage; each slice starts at a multiple of 16 bytes."""
    found: dict[str, Tensor] = {}
    for dtype in {x.dtype for x in tensors.values()}:
        parts = {name: x for name, x in tensors.items() if x.dtype == dtype}
        step = 16 // dtype.itemsize
        sizes = [-(-x.numel() // step) * step for x in parts.values()]
        whole = unwritten(next(iter(parts.values())), (sum(sizes),)).split(sizes)
        for (name, x), memory in zip(parts.items(), whole, strict=True):
            found[name] = memory[: x.numel()].view(x.shape).copy_(x)
    return {name: found[name] for name in tensors}


def wider(x: Tensor) -> Tensor:
    """Return x in a dtype of twice the bits."""
    return x.double() if x.dtype == torch.float32 else x.float()


def _all(change: Callable[[Tensor], Tensor], alone: bool = False) -> Layout:
    return Layout(each(change), each(change), each(change), alone=alone)


LAYOUTS: dict[str, Layout] = {
    "transposed": _all(transposed, alone=True),
    "columns first, gradients of sums": Layout(each(columns_first), each(of_a_sum), each(columns_first), True),
    "every second element": _all(strided),
    "slices": _all(sliced),
    "offset": _all(offset, alone=True),
    "expanded": Layout(repeated_rows_and_heads, each(expanded(1)), repeats=True),
    "one storage, gradients of another dtype": Layout(in_one_storage, each(wider), in_one_storage),
}
