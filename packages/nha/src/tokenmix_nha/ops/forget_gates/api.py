"""The public function of the gates: shapes, checks and the choice of an implementation."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from tokenmix_core.ops.common import Impl, check_dtype, check_tensors, row_impl
from tokenmix_nha.ops.forget_gates.reference import log_forget_gates_reference

_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def log_forget_gates(
    f: Float[Tensor, "*tokens F"], *, normalizer: float = 1.0, impl: Impl | None = None
) -> Float[Tensor, "*tokens F"]:
    """log α = log σ(f) / τ (after equation 6), at most 0, computed and returned in float32; the gradient keeps f.

    Args:
        f: `[*, F]`, the projection; a slice of a wider tensor is read where it lies.
        normalizer: τ, positive.
        impl: "triton", "reference" (any device), or None: Triton for CUDA tensors in eager mode, the reference for
            others, and where torch.compile traces, which fuses it with its neighbours.

    Raises:
        ValueError: a dtype that has no gates, no dimension, or a τ that is not positive.
    """
    op = "log_forget_gates"
    check_tensors(op, f=f)
    check_dtype(op, _FLOATS, f=f)
    if not f.dim():
        raise ValueError(f"{op}: f must have at least one dimension, got a scalar")
    check_normalizer(op, normalizer)
    if row_impl(op, impl, f) == "reference" or not f.numel():
        return log_forget_gates_reference(f, normalizer)
    from tokenmix_nha.ops.forget_gates.autograd import gates

    return gates(f, normalizer)


def check_normalizer(op: str, normalizer: float) -> None:
    """Raise a ValueError for a τ that is not positive."""
    if not (normalizer > 0 and math.isfinite(normalizer)):
        raise ValueError(f"{op}: normalizer must be positive, got {normalizer!r}")
