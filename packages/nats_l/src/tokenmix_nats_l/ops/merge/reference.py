"""Eager reference of the merge, for any device and up to float64; it specifies the operation and its gradient."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

Norm = Callable[[Tensor], Tensor]


def merge_reference(
    linear: Float[Tensor, "B T H V"],
    softmax: Float[Tensor, "B T H V"],
    gate: Float[Tensor, "B T E"],
    linear_norm: Float[Tensor, "V"],
    softmax_norm: Float[Tensor, "V"] | None,
    logits: Float[Tensor, "B T two H"] | None,
    eps: float,
) -> Float[Tensor, "B T E"]:
    """Compute y of `merge_operations`, differentiable by autograd, in float32 (or float64); only y is rounded."""
    wide = torch.promote_types(linear.dtype, torch.float32)

    def normed(weight: Tensor) -> Norm:
        return lambda x: F.rms_norm(x, x.shape[-1:], weight.to(wide), eps)

    norms = normed(linear_norm), None if softmax_norm is None else normed(softmax_norm)
    return merge_by_norms(linear.to(wide), softmax.to(wide), gate, *norms, logits)


def merge_by_norms(
    linear: Float[Tensor, "B T H V"],
    softmax: Float[Tensor, "B T H V"],
    gate: Float[Tensor, "B T E"],
    linear_norm: Norm,
    softmax_norm: Norm | None,
    logits: Float[Tensor, "B T two H"] | None,
) -> Float[Tensor, "B T E"]:
    """Compute y of `merge_operations` with the given norms: functions or modules that return the dtype of `linear`."""
    wide = torch.promote_types(linear.dtype, torch.float32)
    if softmax_norm is not None:
        linear, softmax = linear_norm(linear), softmax_norm(softmax)
    linear, softmax = linear.to(wide), softmax.to(wide)
    if logits is not None:
        of_linear, of_softmax = logits.to(wide).softmax(-2).unsqueeze(-1).unbind(-3)
        linear, softmax = of_linear * linear, of_softmax * softmax
    y = linear + softmax
    if softmax_norm is None:
        y = linear_norm(y)
    return (y.flatten(-2) * F.silu(gate.to(wide))).to(gate.dtype)
