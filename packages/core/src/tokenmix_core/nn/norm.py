"""Root-mean-square normalisation, plain and gated."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from tokenmix_core.nn.dtypes import matmul_dtype
from tokenmix_core.nn.plain import is_plain
from tokenmix_core.ops import gated_rms_norm, rms_norm
from tokenmix_core.ops.fused.rms_norm import GatePosition


class RMSNorm(nn.Module):
    """y = x / √(mean(x²) + eps) · weight over the last dimension, computed in float32.

    y has the dtype in which the next matmul reads it: autocast's dtype for a float32 x under autocast, else x's dtype.

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
        return rms_norm(x, self.weight, eps=self.eps, dtype=matmul_dtype(x)).y

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


def add_and_norm(
    norm: RMSNorm, x: Float[Tensor, "*rows size"], branch: Float[Tensor, "*rows size"] | None
) -> tuple[Tensor, Tensor]:
    """Return (norm(x + branch), x + branch), or (norm(x), x) if `branch` is None.

    One kernel does both if `norm` is exactly an `RMSNorm`: no subclass, no hooks (see `is_plain`).
    """
    if is_plain(RMSNorm, norm):
        y, total = rms_norm(x, norm.weight, branch, eps=norm.eps, dtype=matmul_dtype(x))
        return y, total
    total = x if branch is None else x + branch
    return norm(total), total


class GatedRMSNorm(nn.Module):
    """RMS normalisation with a SiLU gate.

        gate "after":   y = norm(x) · weight · silu(z)        (Gated DeltaNet)
        gate "before":  y = norm(x · silu(z)) · weight        (Mamba-2)

    Args:
        size: length of the last dimension and of the weight.
        eps: added to the mean square.
        gate: whether the gate acts before or after the normalisation.
        groups: number of equal parts of the last dimension that are normalised separately.

    Raises:
        ValueError: an unknown gate, or groups that do not divide the size.
    """

    def __init__(self, size: int, eps: float = 1e-6, *, gate: GatePosition = "after", groups: int = 1):
        super().__init__()
        if gate not in ("before", "after"):
            raise ValueError(f"GatedRMSNorm: gate must be 'before' or 'after', got {gate!r}")
        if groups < 1 or size % groups:
            raise ValueError(f"GatedRMSNorm: groups must divide the size, got groups={groups} and size={size}")
        self.weight = nn.Parameter(torch.empty(size))
        self.eps, self.groups = eps, groups
        self.gate: GatePosition = gate
        self.init_weights_()

    def init_weights_(self) -> None:
        nn.init.ones_(self.weight)

    def forward(
        self, x: Float[Tensor, "*rows size"], z: Float[Tensor, "*rows size"] | None
    ) -> Float[Tensor, "*rows size"]:
        """Return y for the input x and the gate z, to which SiLU is not applied yet; without z, the gate is 1."""
        size = self.weight.shape[0] // self.groups
        return gated_rms_norm(x, z, self.weight, size=size, eps=self.eps, gate=self.gate)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}, gate={self.gate!r}, groups={self.groups}"
