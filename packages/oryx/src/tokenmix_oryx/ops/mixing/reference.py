"""The reference of `mix` in eager PyTorch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenmix_core.nn import apply_rotary, at_least_float32
from tokenmix_core.ops import Impl, chunk_gated_delta_rule, chunk_ssd, short_conv, without_padding
from tokenmix_oryx.ops.selected_queries.reference import selected_attention_by_runs


def mix_reference(
    rows, shared, A_log, dt_bias, D, k_weight, v_weight, norm_weight, row_ids, attends, rotation, cu_seqlens, options,
    *, impl: Impl = "reference",
) -> Tensor:  # fmt: skip
    """Compute `mix`, differentiable by autograd; `impl` selects the implementation of the recurrence."""
    shared = without_padding(shared, cu_seqlens)
    (B, T, _), E, H = shared.shape, rows.shape[1], options.heads
    heads = (H, E // H)
    k, v, gate, rates = shared.split((E, E, E, shared.shape[-1] - 3 * E), -1)
    rates = at_least_float32(rates)
    dt = F.softplus(rates[..., :H] + dt_bias)
    g = -A_log.exp() * dt
    own = attends[..., None]
    q = without_padding((rows if row_ids is None else rows[row_ids]).view(B, T, E), cu_seqlens)
    activated = F.silu(q)
    q = torch.where(
        own,
        activated if options.silu_attention_query else q,
        activated if options.silu_linear_query else q,
    )
    activation = "silu" if options.silu_shared else None
    k, v = (
        short_conv(x, weight, activation=activation, cu_seqlens=cu_seqlens, impl="reference").o
        for x, weight in ((k, k_weight), (v, v_weight))
    )
    q, k, v = (x.unflatten(-1, heads) for x in (q, k, v))
    rotated_q, rotated_k = (apply_rotary(x, rotation) for x in (q, k))
    attention = selected_attention_by_runs(rotated_q, rotated_k, v, attends, cu_seqlens=cu_seqlens, impl="reference")
    if options.rotate_linear:
        q, k = rotated_q, rotated_k
    if D is not None:
        scaled = (v * dt.unsqueeze(-1)).to(v.dtype)
        linear = chunk_ssd(q, k, scaled, g, cu_seqlens=cu_seqlens, impl=impl).o
        linear = (linear + v * D.unsqueeze(-1)).to(v.dtype)
    else:
        beta = rates[..., H : 2 * H].sigmoid()
        linear = chunk_gated_delta_rule(q, k, v, g, beta, cu_seqlens=cu_seqlens, qk_l2norm=True, impl=impl).o
    o, opened = torch.where(own[..., None], attention, linear).flatten(-2), F.silu(gate)
    if options.gate_before:
        o = o * opened
    parts = o.unflatten(-1, (options.groups, -1))
    o = F.rms_norm(parts, parts.shape[-1:], None, options.eps).flatten(-2) * norm_weight.to(o.dtype)
    return without_padding(o if options.gate_before else o * opened, cu_seqlens)
