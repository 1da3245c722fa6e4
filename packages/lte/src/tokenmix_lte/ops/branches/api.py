"""The public function of the gated sum: checks, the reference, and selection of the implementation."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from tokenmix_core.kernels import Checked
from tokenmix_core.ops import Impl, bind_shapes, check_dtype, check_same_dtype, row_impl

_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def gated_sum(
    compressed: Float[Tensor, "B T HQ V"],
    selected: Float[Tensor, "B T HQ V"],
    window: Float[Tensor, "B T HQ V"],
    gates: Float[Tensor, "B T HQ 3"],
    *,
    impl: Impl | None = None,
) -> Float[Tensor, "B T HQ V"]:
    """Return a · compressed + b · selected + c · window, where (a, b, c) are the gates of a token and head.

    Differentiable in all four inputs, which are saved for the backward pass. Kernels compute in float32 and round the
    result once.

    Args:
        compressed, selected, window: outputs of NSA's branches, all bfloat16, float16, float32 or float64.
        gates: gates of the branches in this order, in the same dtype.
        impl: "triton", "reference" (any device), or None: Triton for CUDA tensors, except float64. torch.compile traces
            the reference, which it fuses with adjacent operations.

    Raises:
        ValueError: shapes, dtypes or devices that do not match, or an `impl` that does not support the call.
    """
    _check(compressed, selected, window, gates)
    if row_impl("gated_sum", impl, compressed) == "reference" or not compressed.numel():
        return gated_sum_reference(compressed, selected, window, gates)
    from tokenmix_lte.ops.branches.kernels import gated_sum_triton

    return gated_sum_triton(compressed, selected, window, gates)


def gated_sum_reference(compressed: Tensor, selected: Tensor, window: Tensor, gates: Tensor) -> Tensor:
    """Compute `gated_sum` in eager PyTorch, for any device and dtype; differentiable by autograd."""
    a, b, c = gates.unsqueeze(-1).unbind(-2)
    return torch.addcmul(torch.addcmul(a * compressed, b, selected), c, window)


@Checked
def _check(compressed, selected, window, gates) -> None:
    op, shape = "gated_sum", "B T HQ V"
    bind_shapes(
        op, {}, compressed=(compressed, shape), selected=(selected, shape), window=(window, shape),
        gates=(gates, "B T HQ 3"),
    )  # fmt: skip
    check_dtype(op, _FLOATS, compressed=compressed)
    check_same_dtype(op, compressed=compressed, selected=selected, window=window, gates=gates)
