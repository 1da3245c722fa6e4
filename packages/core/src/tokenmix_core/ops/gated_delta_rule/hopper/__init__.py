"""Steps of the gated delta rule on Hopper for 16-bit inputs, in Gluon, which is part of Triton.

Triton's own forms of these steps pass tiles through registers on their way to shared memory and change layouts there;
they spill, and wait at every such place. Here tiles go straight to shared memory while products run, and computed
matrices stay in registers as left operands of the next product.
"""

from torch import Tensor

from tokenmix_core.ops.common import on_hopper


def takes(q: Tensor, k: Tensor, do: Tensor) -> bool:
    """Whether these steps exist for q and k `[B, T, H, K]` and an upstream gradient `[B, T, HV, V]`."""
    sizes = q.element_size() == 2 and q.shape[-1] == do.shape[-1] and q.shape[-1] in (64, 128)
    return sizes and on_hopper(q.device) and all(x.data_ptr() % 16 == 0 for x in (q, k, do))
