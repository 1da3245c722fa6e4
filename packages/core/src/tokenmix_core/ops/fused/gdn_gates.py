"""The gates of Gated DeltaNet: public function, checks, and the reference in eager PyTorch."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from tokenmix_core.ops.checks import bind_shapes, check_dtype
from tokenmix_core.ops.dispatch import row_impl
from tokenmix_core.ops.types import Impl

_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


class Gates(NamedTuple):
    """The result of `delta_gates`.

    Attributes:
        g: natural logarithm of the decay, at most 0, `[B, T, HV]` float32 (float64 for float64 inputs).
        beta: write strength, `[B, T, HV]` float32 (float64 for float64 inputs).
    """

    g: Tensor
    beta: Tensor


def delta_gates(
    a: Float[Tensor, "B T HV"],
    b: Float[Tensor, "B T HV"],
    A_log: Float[Tensor, "HV"],
    dt_bias: Float[Tensor, "HV"],
    *,
    max_beta: float = 1.0,
    impl: Impl | None = None,
) -> Gates:
    """Return g = −exp(A_log) · softplus(a + dt_bias) and β = max_beta · sigmoid(b). Differentiable.

    Results are float32, or float64 for float64 inputs, which the reference computes.

    Args:
        a, b: `[B, T, HV]`, linear projections of the layer's input; slices of a wider tensor are not copied.
        A_log, dt_bias: the layer's parameters, `[HV]`.
        max_beta: upper bound of β; 2 allows reflections of the state.
        impl: "triton", "reference" (any device), or None: Triton for CUDA tensors in eager mode, else the reference,
            which torch.compile fuses with its neighbours.

    Raises:
        ValueError: shapes, dtypes or devices do not fit.
    """
    op = "delta_gates"
    bind_shapes(
        op, {}, a=(a, "B T HV"), b=(b, "B T HV"), A_log=(A_log, "HV"), dt_bias=(dt_bias, "HV")
    )  # fmt: skip
    check_dtype(op, _FLOATS, a=a, b=b, A_log=A_log, dt_bias=dt_bias)
    if row_impl(op, impl, a) == "reference" or not a.numel():
        return Gates(*delta_gates_reference(a, b, A_log, dt_bias, max_beta))
    from tokenmix_core.ops.fused.gdn_gates_kernels import gates

    return Gates(*gates(a, b, A_log, dt_bias, max_beta))


def delta_gates_reference(
    a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, max_beta: float
) -> tuple[Tensor, Tensor]:
    """Return g and β in float32, or in float64 for float64 inputs; for any device and dtype."""
    a, b = (x if x.dtype == torch.float64 else x.float() for x in (a, b))
    return -A_log.exp() * F.softplus(a + dt_bias), max_beta * b.sigmoid()
