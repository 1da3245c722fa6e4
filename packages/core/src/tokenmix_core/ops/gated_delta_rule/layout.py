"""What the launchers share: the chunk length, how programs are shared out, the precision of products."""

import torch
from torch import Tensor

from tokenmix_core.ops.common import interpreting, on_hopper

CHUNK = 64

# sizes that Triton would otherwise compile anew for: those equal to 1, and those divisible by 16
SIZES = ("T", "N", "H", "group", "tokens")


def walks(k: Tensor, v: Tensor) -> int:
    """Programs along a sequence and value head: on Hopper heads of 256 are shared out by 64 columns of V."""
    wide = max(k.shape[-1], v.shape[-1]) > 128 and k.element_size() == 2
    return v.shape[-1] // 64 if wide and on_hopper(k.device) else 1


def dot_precision(x: Tensor) -> str:
    """float32 inputs are multiplied to nearly float32's precision; other products ignore the argument."""
    return "tf32x3" if x.element_size() == 4 else "tf32"


def solve_precision(x: Tensor) -> str:
    """The inverse amplifies rounding where keys repeat, so its products are finer than the inputs."""
    # three parts of bfloat16 make 16 bits, enough for bfloat16 alone; the interpreter knows no parts and needs none
    return "bf16x3" if x.dtype == torch.bfloat16 and not interpreting() else "tf32x3"
