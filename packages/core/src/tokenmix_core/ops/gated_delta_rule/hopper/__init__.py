"""Steps of the gated delta rule on Hopper for 16-bit inputs, in Gluon, which is part of Triton.

Triton's own forms of these steps pass tiles through registers on their way to shared memory and change layouts there;
they spill, and wait at every such place. Here tiles go straight to shared memory while products run, and computed
matrices stay in registers as left operands of the next product.
"""

import functools
import importlib.util

import torch
from torch import Tensor


def takes(q: Tensor, v: Tensor) -> bool:
    """Whether these steps exist for q `[B, T, H, K]` and v `[B, T, HV, V]`."""
    return q.element_size() == 2 and q.shape[-1] == v.shape[-1] and v.shape[-1] in (64, 128) and _on_hopper(q.device)


@functools.cache
def _on_hopper(device: torch.device) -> bool:
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return False
    return importlib.util.find_spec("triton.experimental.gluon") is not None
