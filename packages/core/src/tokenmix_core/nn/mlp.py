"""The MLP that follows the token mixer in each block."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from tokenmix_core.chunking import cdiv
from tokenmix_core.nn.projections import is_plain_linear, output_linear, projected
from tokenmix_core.ops import swiglu, swiglu_linear


def swiglu_width(hidden_size: int, ratio: float = 4.0, multiple: int = 256) -> int:
    """Return ⅔ · ratio · D, rounded up to a multiple of `multiple`.

    A SwiGLU of this width has about as many parameters as an MLP of ratio · D units.
    """
    return cdiv(int(hidden_size * ratio * 2 / 3), multiple) * multiple


class SwiGLU(nn.Module):
    """y = W_down (silu(W_gate x) · W_up x) (Shazeer 2020), without biases."""

    def __init__(self, hidden_size: int, intermediate_size: int):
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(
        self, x: Float[Tensor, "*rows D"], residual: Float[Tensor, "*rows D"] | None = None
    ) -> Float[Tensor, "*rows D"]:
        """Return the output, added to `residual` if given."""
        gate, up = projected(x, self.gate_proj, self.up_proj)
        autocast = torch.is_autocast_enabled(gate.device.type)
        if not is_plain_linear(self.down_proj) or (autocast and not torch.is_grad_enabled()):
            y = output_linear(swiglu(gate, up), self.down_proj)
            return y if residual is None else residual + y
        weight = self.down_proj.weight
        # cast the weight, as autocast does when the layer is called
        weight = weight.to(gate.dtype) if autocast else weight
        if residual is None or residual.dtype == gate.dtype:
            return swiglu_linear(gate, up, weight, residual)
        return residual + swiglu_linear(gate, up, weight)
