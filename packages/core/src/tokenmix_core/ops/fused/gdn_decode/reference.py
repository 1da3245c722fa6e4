"""A layer's step in eager PyTorch, for any device and dtype: the references of its operations, one after the other."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from tokenmix_core.ops.causal_conv1d.reference import short_conv_step_reference
from tokenmix_core.ops.fused.gdn_gates.reference import delta_gates_reference
from tokenmix_core.ops.fused.rms_norm import gated_rms_norm_reference
from tokenmix_core.ops.gated_delta_rule.reference import recurrent_reference


def delta_layer_step_reference(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, gate: Tensor | None, weights: Sequence[Tensor],
    inputs: Sequence[Tensor], A_log: Tensor, dt_bias: Tensor, norm_weight: Tensor, state: Tensor, scale: float,
    max_beta: float, eps: float,
) -> Tensor:  # fmt: skip
    """y `[B, HV, V]`; `inputs` and `state` are updated in place."""
    q, k, v = (
        short_conv_step_reference(x.flatten(1), weight, None, last, activation="silu").view_as(x)
        for x, weight, last in zip((q, k, v), weights, inputs, strict=True)
    )
    g, beta = delta_gates_reference(a, b, A_log, dt_bias, max_beta)
    (HV, V), (K, columns) = v.shape[1:], state.shape[2:]
    # the parts of a head side by side, without padding
    parts = state.unflatten(1, (HV, -1))
    whole = parts.transpose(2, 3).flatten(3)[..., : q.shape[2], :V]
    token = (x.unsqueeze(1) for x in (q, k, v, g, beta))
    o, after = recurrent_reference(*token, scale, whole, qk_l2norm=True)
    after = F.pad(after, (0, parts.shape[2] * columns - V, 0, K - q.shape[2]))
    parts.copy_(after.unflatten(3, (-1, columns)).transpose(2, 3))
    return gated_rms_norm_reference(o.squeeze(1), gate, norm_weight, eps, "after", V, v.dtype)
