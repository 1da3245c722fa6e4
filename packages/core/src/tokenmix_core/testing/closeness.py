"""Errors relative to float64 results, and a tolerance derived from a baseline's measured error."""

from __future__ import annotations

import torch
from torch import Tensor


def relative_error(x: Tensor, reference: Tensor) -> float:
    """Return ‖x − reference‖ / ‖reference‖ in float64; ‖x‖ if the reference is zero; inf if x contains inf or NaN."""
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
    """Assert that the error of x is at most `factor` times the error of `baseline`, the eager reference in x's dtype.

    `exact` is the float64 reference. An error up to `floor` is always allowed, because the baseline may be exact by
    chance; by default `floor` is the eps of x's dtype, twice the greatest error of rounding the exact result to it.
    """
    if floor is None:
        floor = torch.finfo(x.dtype).eps
    error, tolerance = relative_error(x, exact), max(factor * relative_error(baseline, exact), floor)
    assert error <= tolerance, (
        f"{name}: relative error {error:.3e} exceeds {tolerance:.3e} ({factor} x the reference's)"
    )
