"""The public function that computes log-gates: checks, the reference, and selection of the implementation."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from tokenmix_core.nn import at_least_float32
from tokenmix_core.ops import Impl, check_dtype, check_tensors, row_impl

_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def log_forget_gates(
    f: Float[Tensor, "*tokens F"], *, normalizer: float = 1.0, impl: Impl | None = None
) -> Float[Tensor, "*tokens F"]:
    """Compute log α = log σ(f) / τ ≤ 0 (paper, below equation 6) in float32, or in float64 if f is float64; autograd
    saves only f.

    Args:
        f: `[*, F]`, the logits of the gates; a slice of a wider tensor is read without a copy.
        normalizer: τ, positive.
        impl: "triton", "reference" (any device), or None: Triton for CUDA tensors in eager mode, else the reference.
            Under torch.compile, which fuses the reference with neighbouring operations, and for float64 the reference
            always runs.

    Raises:
        ValueError: f has no floating dtype or no dimension, or τ is not positive and finite.
    """
    op = "log_forget_gates"
    check_tensors(op, f=f)
    check_dtype(op, _FLOATS, f=f)
    if not f.dim():
        raise ValueError(f"{op}: f must have at least one dimension, got a scalar")
    check_normalizer(op, normalizer)
    if row_impl(op, impl, f) == "reference" or not f.numel():
        return log_forget_gates_reference(f, normalizer)
    from tokenmix_nha.ops.forget_gates.kernels import gates

    return gates(f, normalizer)


def log_forget_gates_reference(f: Tensor, normalizer: float) -> Tensor:
    """Return log α = log σ(f) / τ in eager PyTorch, on any device, in float32 or a wider dtype."""
    return F.logsigmoid(at_least_float32(f)) / normalizer


def check_normalizer(op: str, normalizer: float) -> None:
    """Raise a ValueError unless `normalizer` (τ) is positive and finite."""
    if not (normalizer > 0 and math.isfinite(normalizer)):
        raise ValueError(f"{op}: normalizer must be positive, got {normalizer!r}")
