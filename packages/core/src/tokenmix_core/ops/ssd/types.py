"""What the steps of a pass hand to one another, by the names that kernels and README.md give it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tokenmix_core.ops.buffers import aligned


class Inputs(NamedTuple):
    """The arguments of `chunk_ssd`, in the order of the operators' schemas; steps take them `aligned`."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    scale: float
    initial_state: Tensor | None
    cu_seqlens: Tensor | None
    dt: Tensor | None = None
    D: Tensor | None = None
    impl: str | None = None

    def aligned(self) -> Inputs:
        """The same as kernels read it: rows of tokens where they lie, if they lie well, other tensors contiguous."""
        q, k, v = map(token_rows, self[:3])
        g, initial_state, dt, D = map(aligned, (self.g, self.initial_state, self.dt, self.D))
        return self._replace(q=q, k=k, v=v, g=g, initial_state=initial_state, dt=dt, D=D)


def token_rows(x: Tensor) -> Tensor:
    """x `[B, T, H, D]` itself where its tokens lie at one stride in rows of H · D, as in a slice of a wider tensor."""
    B, T, H, D = x.shape
    stride = x.stride()
    rows = stride[3] == 1 and (H == 1 or stride[2] == D) and (B == 1 or stride[0] == T * stride[1])
    # at strides that are no multiples of 16 Triton reads element by element, and 3.6 compiled states wrong beside that
    if rows and stride[1] % 16 == 0 and x.data_ptr() % 16 == 0:
        return x
    # one token may lie at any stride in what is contiguous
    return x.clone(memory_format=torch.contiguous_format)


class Gradients(NamedTuple):
    """Gradients of a call's tensors; dq and dk are of groups, or of value heads before these are summed.

    `initial_state` is None where segments' states make that gradient; dt and D are None where there are none.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    initial_state: Tensor | None = None
    dt: Tensor | None = None
    D: Tensor | None = None
