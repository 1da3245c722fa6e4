"""Rows in other places, whose gradient goes back by the inverse map: nothing is sorted and no two rows are added."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor


def moved(
    x: Float[Tensor, "R ..."], places: Int[Tensor, "..."], back: Int[Tensor, "R"], *, holes: bool = False
) -> Float[Tensor, "..."]:
    """x[places], for rows that are read once each, or, with `holes`, once at the most.

    Args:
        x: rows, of any shape.
        places: the row to read for each row of the result, which has these dimensions in the place of x's first; −1
            for none, which reads 0.
        back: for each row of x, where it went, counted through all dimensions of `places`; −1 for a row that is not
            read, whose gradient is 0.
        holes: whether there may be a −1.
    """
    return _Moved.apply(x, places, back, holes)


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, places: Tensor, back: Tensor, holes: bool) -> Tensor:
        ctx.save_for_backward(back)
        ctx.dims, ctx.holes = places.ndim, holes
        return _read(x, places, holes)

    @staticmethod
    def backward(ctx, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        (back,) = ctx.saved_tensors
        return _read(grad.flatten(0, ctx.dims - 1), back, ctx.holes), None, None, None


def _read(x: Tensor, places: Tensor, holes: bool) -> Tensor:
    if not holes:
        return x[places]
    none = (places < 0).view(*places.shape, *[1] * (x.ndim - 1))
    return x[places.clamp(min=0)].masked_fill_(none, 0)
