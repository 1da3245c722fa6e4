"""Root-mean-square normalisation, plain and gated."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

GatePlace = Literal["before", "after"]


class RMSNorm(nn.Module):
    """y = x / √(mean(x²) + eps) · weight over the last dimension; sums are taken in float32.

    Args:
        size: length of the last dimension.
        eps: added to the mean square.
    """

    def __init__(self, size: int, eps: float = 1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps
        self.init_weights_()

    def init_weights_(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: Float[Tensor, "*rows size"]) -> Float[Tensor, "*rows size"]:
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


class GatedRMSNorm(nn.Module):
    """RMS normalisation with a SiLU gate.

        gate "after":   y = norm(x) · weight · silu(z)        (Gated DeltaNet)
        gate "before":  y = norm(x · silu(z)) · weight        (Mamba-2)

    Args:
        size: length of the last dimension and of the weight.
        eps: added to the mean square.
        gate: whether the gate acts before or after the normalisation.
        groups: the last dimension is normalised in this many equal parts, each on its own.

    Raises:
        ValueError: an unknown gate place, or groups that do not divide the size.
    """

    def __init__(self, size: int, eps: float = 1e-6, *, gate: GatePlace = "after", groups: int = 1):
        super().__init__()
        if gate not in ("before", "after"):
            raise ValueError(f"GatedRMSNorm: gate must be 'before' or 'after', got {gate!r}")
        if groups < 1 or size % groups:
            raise ValueError(f"GatedRMSNorm: groups must divide the size, got groups={groups} and size={size}")
        self.weight = nn.Parameter(torch.empty(size))
        self.gate: GatePlace = gate
        self.eps, self.groups = eps, groups
        self.init_weights_()

    def init_weights_(self) -> None:
        nn.init.ones_(self.weight)

    def forward(
        self, x: Float[Tensor, "*rows size"], z: Float[Tensor, "*rows size"] | None
    ) -> Float[Tensor, "*rows size"]:
        """Normalise; z is the gate before its SiLU, None for a gate of one."""
        return gated_rms_norm(x, z, self.weight, self.eps, gate=self.gate, groups=self.groups)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}, gate={self.gate!r}, groups={self.groups}"


def gated_rms_norm(
    x: Float[Tensor, "*rows size"],
    z: Float[Tensor, "*rows size"] | None,
    weight: Float[Tensor, "size"],
    eps: float,
    *,
    gate: GatePlace = "after",
    groups: int = 1,
) -> Float[Tensor, "*rows size"]:
    """Compute what `GatedRMSNorm` does."""
    gates = None if z is None else F.silu(z)
    if gates is not None and gate == "before":
        x = x * gates
    weight = weight.to(x.dtype)
    if groups == 1:
        y = F.rms_norm(x, weight.shape, weight, eps)
    else:
        parts = x.unflatten(-1, (groups, -1))
        y = F.rms_norm(parts, parts.shape[-1:], None, eps).flatten(-2) * weight
    return y * gates if gates is not None and gate == "after" else y
