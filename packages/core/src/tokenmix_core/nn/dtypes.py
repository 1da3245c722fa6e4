"""Parameters that stay in float32 whatever the rest of the model is converted to."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


def at_least_float32(x: Tensor) -> Tensor:
    """x in float32, or as it is when it is already float64."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def product_dtype(x: Tensor) -> torch.dtype:
    """The dtype that matrix products take x in: autocast's, where it is on and x is float32, else x's own.

    What is handed to several of them is rounded once by whoever makes it, and not by each.
    """
    device = x.device.type
    narrowed = x.dtype == torch.float32 and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if narrowed else x.dtype


def gives_float32(x: Tensor) -> bool:
    """Tell whether products of x can be had as they were summed, in float32: those of 16 bits on a GPU."""
    return x.is_cuda and x.element_size() == 2


class KeepsFloat32(nn.Module):
    """A module some of whose own parameters and buffers stay in float32 through `.to(torch.bfloat16)` and the like.

    Decay rates lose whole percents in bfloat16, and rotary frequencies lose positions.
    """

    float32: tuple[str, ...] = ()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        kept = [t for t in (getattr(self, name, None) for name in self.float32) if t is not None]
        kept += [t.grad for t in kept if t.grad is not None]

        def convert(t: Tensor) -> Tensor:
            out = fn(t)
            if out.dtype.itemsize < 4 and out.is_floating_point() and any(t is x for x in kept):
                return t.to(out.device)
            return out

        return super()._apply(convert, recurse)
