"""Arguments and gradients that SSD's steps exchange, named as in the kernels and README.md."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tokenmix_core.ops.buffers import aligned


class Inputs(NamedTuple):
    """The arguments of `chunk_ssd`: differentiable tensors, then other tensors, then options."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    initial_state: Tensor | None
    dt: Tensor | None
    D: Tensor | None
    cu_seqlens: Tensor | None
    scale: float
    impl: str | None = None

    def aligned(self) -> Inputs:
        """Return the arguments as kernels need them: q, k, v by `token_rows`; g, states, dt, D by `aligned`."""
        q, k, v = map(token_rows, self[:3])
        g, initial_state, dt, D = map(aligned, self[3:7])
        return self._replace(q=q, k=k, v=v, g=g, initial_state=initial_state, dt=dt, D=D)


# the first fields of `Inputs` are tensors; this is their number
TENSORS = 8


class StepInputs(NamedTuple):
    """The arguments of `ssd_step`."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    state: Tensor
    dt: Tensor | None
    D: Tensor | None
    scale: float
    impl: str | None = None
    slots: Tensor | None = None


class PrefillInputs(NamedTuple):
    """The arguments of `ssd_prefill`: the pool and its slots (`Pool`), then those of `chunk_ssd`."""

    state: Tensor
    slots: Tensor
    fresh: Tensor | None
    inputs: Inputs


class Gradients(NamedTuple):
    """Gradients in the order of `Inputs`; dq and dk are per value head until they are summed over each group's heads.

    `initial_state` is None if another step computes it, the scan over segments; dt and D are None if the call has none.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    initial_state: Tensor | None = None
    dt: Tensor | None = None
    D: Tensor | None = None


def token_rows(x: Tensor) -> Tensor:
    """Return x `[B, T, H, D]` if its rows of H · D elements are contiguous, aligned and equally spaced; else a copy."""
    B, T, H, D = x.shape
    stride = x.stride()
    rows = stride[3] == 1 and (H == 1 or stride[2] == D) and (B == 1 or stride[0] == T * stride[1])
    # strides must be multiples of 16: with others Triton loads single elements, and Triton 3.6 computed wrong states
    if rows and stride[1] % 16 == 0 and x.data_ptr() % 16 == 0:
        return x
    # `clone`, because `contiguous` returns a single token (T = 1) unchanged, whatever its stride
    return x.clone(memory_format=torch.contiguous_format)
