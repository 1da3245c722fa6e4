"""The public function of the merge: it checks arguments and selects the implementation."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from tokenmix_core.kernels import Checked
from tokenmix_core.ops import Impl, bind_shapes, check_dtype, check_same_dtype, resolve_impl
from tokenmix_nats_l.ops.merge.reference import merge_reference

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
# maximum number of channels of a head that the kernels support
WIDEST = 1024


def merge_operations(
    linear: Float[Tensor, "B T H V"],
    softmax: Float[Tensor, "B T H V"],
    gate: Float[Tensor, "B T E"],
    linear_norm: Float[Tensor, "V"],
    softmax_norm: Float[Tensor, "V"] | None,
    logits: Float[Tensor, "B T 2 H"] | None,
    *,
    eps: float = 1e-6,
    impl: Impl | None = None,
) -> Float[Tensor, "B T E"]:
    r"""Normalise the outputs of two operations, add them with weights, and gate the sum.

    .. math:: y = \big(w_1 \text{RMS}(l) ⊙ γ_1 + w_2 \text{RMS}(s) ⊙ γ_2\big) ⊙ \text{silu}(z), \quad
        (w_1, w_2) = \text{softmax}(\text{logits})

    for each token and head, where z is the gate. Without γ₂, the weighted sum is normalised instead of each output.
    Differentiable in every tensor. Computed in float32 (float64 for float64 inputs); only y is rounded.

    Args:
        linear, softmax: outputs of the two operations, bfloat16, float16 or float32 (the reference also float64).
        gate: z, to which SiLU is still to be applied, E = H · V channels, in the same dtype.
        linear_norm: γ₁, or the weight of the only norm, that of the sum.
        softmax_norm: γ₂; None for only one norm, of the sum (NAtS-L paper, Table 4, *w/o Attn Norm*).
        logits: for each head, logits of the weights of the linear and the softmax operation; None for weights of 1.
        eps: epsilon of the norms.
        impl: "triton", "reference" (any device), or None: Triton for CUDA tensors with supported heads, else the
            reference. There is no Gluon kernel, because memory bandwidth limits this operation.

    Returns:
        y `[B, T, E]` in the dtype of `linear`.

    Raises:
        ValueError: shapes, dtypes, devices or eps do not fit; the message has the given and the expected values.
    """
    chosen = _check(linear, softmax, gate, linear_norm, softmax_norm, logits, eps, impl)
    if chosen == "reference":
        return merge_reference(linear, softmax, gate, linear_norm, softmax_norm, logits, eps)
    from tokenmix_nats_l.ops.merge.autograd import Inputs, merge_triton

    x = Inputs(
        linear=linear, softmax=softmax, gate=gate, linear_norm=linear_norm, softmax_norm=softmax_norm, logits=logits,
        eps=eps,
    )  # fmt: skip
    return merge_triton(*x)


@Checked
def _check(linear, softmax, gate, linear_norm, softmax_norm, logits, eps, impl) -> str | None:
    """Validate a call; return the implementation by `resolve_impl`, but "reference" for heads wider than `WIDEST`."""
    op = "merge_operations"
    dims = bind_shapes(
        op, {}, linear=(linear, "B T H V"), softmax=(softmax, "B T H V"), gate=(gate, "B T E"),
        linear_norm=(linear_norm, "V"), softmax_norm=(softmax_norm, "V?"), logits=(logits, "B T 2 H?"),
    )  # fmt: skip
    impl = resolve_impl(op, impl, linear)
    if dims["E"] != dims["H"] * dims["V"]:
        raise ValueError(f"{op}: gate must have H · V = {dims['H'] * dims['V']} channels, got {dims['E']}")
    if impl == "triton" and dims["V"] > WIDEST:
        raise ValueError(
            f"{op}: impl='triton' takes heads of up to {WIDEST} channels, got {dims['V']}; pass impl='reference' or "
            "None"
        )
    if dims["V"] > WIDEST:
        impl = "reference"
    floats = (*FLOATS, torch.float64) if impl == "reference" else FLOATS
    check_dtype(op, floats, linear=linear, linear_norm=linear_norm, softmax_norm=softmax_norm, logits=logits)
    check_same_dtype(op, linear=linear, softmax=softmax, gate=gate)
    check_same_dtype(op, linear_norm=linear_norm, softmax_norm=softmax_norm)
    if not (isinstance(eps, (int, float)) and math.isfinite(eps) and eps >= 0):
        raise ValueError(f"{op}: eps must be a finite number of at least 0, got {eps!r}")
    return impl
