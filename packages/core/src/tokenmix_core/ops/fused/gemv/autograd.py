"""The kernel as a function of tensors: direct in eager mode, a custom op where torch traces. Not differentiable."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from tokenmix_core.ops.autograd import cached_op, direct_when_eager, of_fields


class Inputs(NamedTuple):
    """What several linear layers are given; weights that there are not come last."""

    x: Tensor
    weight0: Tensor
    weight1: Tensor | None = None
    weight2: Tensor | None = None
    weight3: Tensor | None = None
    weight4: Tensor | None = None
    weight5: Tensor | None = None


def _weights(given: Inputs) -> list[Tensor]:
    return [w for w in given[1:] if w is not None]


@of_fields
def _run(given: Inputs) -> list[Tensor]:
    """`[B, N]` of each weight."""
    from tokenmix_core.ops.fused.gemv.kernel import fused_linears_forward

    x = given.x if given.x.stride(1) == 1 else given.x.contiguous()
    return fused_linears_forward(x, _weights(given))


fused_linears_op = cached_op("tokenmix_core::fused_linears", _run, mutates_args=())
fused_linears_triton = direct_when_eager(fused_linears_op, _run)


@fused_linears_op.register_fake
@of_fields
def _(given: Inputs):
    return [given.x.new_empty(given.x.shape[0], w.shape[0]) for w in _weights(given)]
