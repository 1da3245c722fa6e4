"""Permutation of rows whose backward gathers by the inverse permutation; torch's own backward sorts or uses atomics."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor


def moved(
    x: Float[Tensor, "R ..."], source: Int[Tensor, "..."], back: Int[Tensor, "R"], *, holes: bool = False
) -> Float[Tensor, "..."]:
    """Return x[source], where `source` names every row of x exactly once (with `holes`, at most once).

    Args:
        x: rows, of any shape.
        source: row of x for each row of the result, whose leading dimensions are those of `source`; −1 gives zeros.
        back: for each row of x, its index in the flattened `source`; −1 for a row that is not read, whose gradient is
            0.
        holes: whether `source` or `back` may contain −1.
    """
    return _Moved.apply(x, source, back, holes)


class _Moved(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, source: Tensor, back: Tensor, holes: bool) -> Tensor:
        return _read(x, source, holes)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        _, source, back, ctx.holes = inputs
        ctx.save_for_backward(back)
        ctx.dims = source.ndim

    @staticmethod
    def backward(ctx, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        (back,) = ctx.saved_tensors
        return _read(grad.flatten(0, ctx.dims - 1), back, ctx.holes), None, None, None


def _read(x: Tensor, source: Tensor, holes: bool) -> Tensor:
    if not holes:
        return x[source]
    none = (source < 0).view(*source.shape, *[1] * (x.ndim - 1))
    return x[source.clamp(min=0)].masked_fill_(none, 0)
