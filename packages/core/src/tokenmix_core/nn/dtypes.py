"""Compute dtypes, and parameters that stay in float32 when the rest of the model is converted."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


def at_least_float32(x: Tensor) -> Tensor:
    """Return x in float32, unless it is float64."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def matmul_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which matmuls read x: autocast's dtype if autocast is on and x is float32, else x's dtype.

    A function whose output several linear layers read rounds it to this dtype once, instead of once per layer.
    """
    device = x.device.type
    narrowed = x.dtype == torch.float32 and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if narrowed else x.dtype


def has_float32_output(x: Tensor) -> bool:
    """Return whether a matmul of x can return its sums unrounded, in float32; true for 16-bit operands on a GPU."""
    return x.is_cuda and x.element_size() == 2


class KeepsFloat32(nn.Module):
    """Base class whose parameters and buffers named in `float32` stay float32 when the module is converted to 16 bits.

    In bfloat16, decay rates would change by whole percents and rotary angles by whole positions.
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
