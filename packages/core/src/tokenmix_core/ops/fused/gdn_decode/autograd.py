"""The kernel as a function: direct in eager mode, a custom op where torch traces."""

from __future__ import annotations

from torch import Tensor

from tokenmix_core.ops.autograd import cached_op, direct_when_eager, of_fields
from tokenmix_core.ops.fused.gdn_decode.types import WRITTEN, Inputs


@of_fields
def _step(x: Inputs) -> Tensor:
    """y; the last inputs and the state are overwritten."""
    from tokenmix_core.ops.fused.gdn_decode.kernel import delta_layer_step

    return delta_layer_step(x.readable())


delta_layer_step_op = cached_op("tokenmix_core::delta_layer_step", _step, mutates_args=WRITTEN)


@delta_layer_step_op.register_fake
@of_fields
def _(x: Inputs):
    return x.v.new_empty(x.v.shape)


step = direct_when_eager(delta_layer_step_op, _step, writes=Inputs._fields.index("state"))
