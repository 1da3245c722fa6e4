"""Pointers of the Gluon emulator."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor


class Pointer:
    """A tensor of pointers: a flat tensor and a tensor of offsets into it."""

    def __init__(self, base: Tensor, offset: Tensor):
        self.base, self.offset = base, offset

    def __add__(self, offset):
        return Pointer(self.base, self.offset + offset)

    def __sub__(self, offset):
        return Pointer(self.base, self.offset - offset)

    def __getitem__(self, index):
        return Pointer(self.base, self.offset[index])

    @property
    def dtype(self):
        return SimpleNamespace(element_ty=self.base.dtype)

    def load(self, mask=None, other=0.0) -> Tensor:
        offset, mask = torch.broadcast_tensors(self.offset, torch.tensor(True) if mask is None else mask)
        x = self.base[torch.where(mask, offset, 0)]
        return torch.where(mask, x, torch.full_like(x, other))

    def store(self, x: Tensor, mask=None) -> None:
        offset, mask, x = torch.broadcast_tensors(self.offset, torch.tensor(True) if mask is None else mask, x)
        # x may have another dtype only if the mask is False everywhere, and is then not stored
        if mask.any():
            assert x.dtype == self.base.dtype
            self.base[offset[mask]] = x[mask]


class SelectedPointer:
    """A tensor of pointers for loads: each is an element of `x` if the condition holds, else of `y`."""

    def __init__(self, condition: Tensor, x: Pointer, y: Pointer):
        self.condition, self.x, self.y = condition, x, y

    def __add__(self, offset):
        return SelectedPointer(self.condition, self.x + offset, self.y + offset)

    def __getitem__(self, index):
        return SelectedPointer(self.condition[index], self.x[index], self.y[index])

    def load(self, mask=None, other=0.0) -> Tensor:
        mask = torch.tensor(True) if mask is None else mask
        x, y = self.x.load(mask & self.condition, other), self.y.load(mask & ~self.condition, other)
        return torch.where(self.condition, x, y)
