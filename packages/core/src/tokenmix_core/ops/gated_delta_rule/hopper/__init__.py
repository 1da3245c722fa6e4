"""Steps of the gated delta rule on Hopper for 16-bit inputs, in Gluon, which is part of Triton.

Triton's own forms of these steps pass tiles through registers on their way to shared memory and change layouts there;
they spill, and wait at every such place. Here tiles go straight to shared memory while products run, and computed
matrices stay in registers as left operands of the next product.
"""

from torch import Tensor

from tokenmix_core.ops.common import on_hopper


def takes(x: Tensor, *others: Tensor) -> bool:
    """Whether these steps exist for tensors `[B, T, H, D]` of one dtype that they read by rows."""
    D = x.shape[-1]
    sizes = x.element_size() == 2 and D in (64, 128) and all(y.shape[-1] == D for y in others)
    return sizes and on_hopper(x.device) and all(y.data_ptr() % 16 == 0 for y in (x, *others))
