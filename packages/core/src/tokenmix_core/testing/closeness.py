"""Errors against float64, with a measured tolerance."""

from __future__ import annotations

import torch
from torch import Tensor


def relative_error(x: Tensor, reference: Tensor) -> float:
    """‖x − reference‖ / ‖reference‖ in float64; ‖x‖ if the reference is zero; inf if x is not finite."""
    x, reference = x.detach().double().cpu(), reference.detach().double().cpu()
    if x.shape != reference.shape:
        raise AssertionError(f"shapes differ: {list(x.shape)} and {list(reference.shape)}")
    if not torch.isfinite(x).all():
        return float("inf")
    norm = reference.norm().item()
    error = (x - reference).norm().item()
    return error / norm if norm else error


def assert_within(
    name: str, x: Tensor, exact: Tensor, baseline: Tensor, *, factor: float = 2.0, floor: float | None = None
) -> None:
    """Assert that x errs at most `factor` times as much as `baseline`, the eager reference in x's own dtype, does.

    `exact` is the float64 reference. `floor` guards against a baseline that is right by luck: it defaults to one unit
    of rounding of x's dtype, the error that storing the exact result would make.
    """
    if floor is None:
        floor = torch.finfo(x.dtype).eps
    error, tolerance = relative_error(x, exact), max(factor * relative_error(baseline, exact), floor)
    assert error <= tolerance, (
        f"{name}: relative error {error:.3e} exceeds {tolerance:.3e} ({factor} x the reference's)"
    )
