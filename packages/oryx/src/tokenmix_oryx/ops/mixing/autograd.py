"""The fused form of a mixed call and its gradients: directly in eager mode, as torch custom ops where torch traces."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenmix_core.ops.common import differentiable, direct_when_eager, recorded_op, retried
from tokenmix_core.ops.convolution.autograd import token_rows
from tokenmix_core.ops.gated_delta_rule import autograd as delta_rule
from tokenmix_core.ops.ssd import autograd as ssd
from tokenmix_oryx.ops.selected_queries.autograd import CAUSAL


def _widened(*heads: Tensor) -> tuple[Tensor, ...]:
    """Heads as SSD's gradients are right for them: zeros add nothing to any product."""
    K = heads[0].shape[-1]
    return tuple(F.pad(x, (0, 64 - K)) for x in heads) if ssd.needs_widening(heads[0], K) else heads


def _linear_forward(q, k, v, g, dt, D, beta, cu_seqlens, impl) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Outputs of the linear mixer for all tokens, and what its backward pass needs."""
    if beta is None:
        K, (q, k, v) = q.shape[-1], _widened(q, k, v)
        o, *_ = ssd.run_forward(
            q=q, k=k, v=v, g=g, scale=1.0, initial_state=None, cu_seqlens=cu_seqlens, dt=dt, D=D, impl=impl
        )
        return o[..., :K].contiguous(), ()
    o, _, *terms = delta_rule.run_forward(
        q=q, k=k, v=v, g=g, beta=beta, initial_state=None, cu_seqlens=cu_seqlens, scale=q.shape[-1] ** -0.5,
        qk_l2norm=True, impl=impl,
    )  # fmt: skip
    return o, tuple(terms)


def _linear_backward(q, k, v, g, dt, D, beta, cu_seqlens, saved, do, impl) -> tuple[Tensor | None, ...]:
    """dq, dk, dv, dg, dΔ, dD and dβ, of the last three those that there are."""
    if beta is None:
        K, (q, k, v, do) = q.shape[-1], _widened(q, k, v, do)
        *grads, dg, _, ddt, dD = ssd.run_backward(
            q=q, k=k, v=v, g=g, scale=1.0, initial_state=None, cu_seqlens=cu_seqlens, before=None, do=do,
            final_gradient=None, dt=dt, D=D, impl=impl,
        )  # fmt: skip
        dq, dk, dv = (x[..., :K].contiguous() for x in grads)
        return dq, dk, dv, dg, ddt, dD, None
    inverse, gates = saved
    dq, dk, dv, dg, dbeta, *_ = delta_rule.run_whole_backward(
        do=do, dfinal_state=None, q=q, k=k, v=v, g=g, beta=beta, inverse=inverse, gates=gates, initial_state=None,
        cu_seqlens=cu_seqlens, scale=q.shape[-1] ** -0.5, qk_l2norm=True, impl=impl,
    )  # fmt: skip
    return dq, dk, dv, dg, None, None, dbeta


def _contiguous(*tensors: Tensor | None) -> tuple[Any, ...]:
    return tuple(x if x is None else x.contiguous() for x in tensors)


def _parts(shared: Tensor, E: int) -> tuple[Tensor, ...]:
    """k, v, gate and rates: columns of the product of all projections that both modes share."""
    shared = token_rows(shared)
    return shared.split((E, E, E, shared.shape[-1] - 3 * E), -1)


@retried
def _forward(
    rows: Tensor, shared: Tensor, A_log: Tensor, dt_bias: Tensor, D: Tensor | None, k_weight: Tensor, v_weight: Tensor,
    norm_weight: Tensor, places: Tensor | None, attends: Tensor, cos: Tensor, sin: Tensor, cu_seqlens: Tensor | None,
    silu_shared: bool, silu_attention: bool, silu_linear: bool, turn_linear: bool, gate_before: bool, groups: int,
    eps: float, impl: str | None = None,
) -> tuple[
    Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor
]:  # fmt: skip
    """y `[B, T, E]`, and what the backward pass needs: q, k as either mixer reads it and v; attention's outputs and
    log-sum-exp; the linear mixer's outputs, g, Δ, β and two tensors of its own. What there is not is empty."""
    from tokenmix_core.ops.softmax_attention.forward import attention_forward
    from tokenmix_oryx.ops.mixing.output import output_forward
    from tokenmix_oryx.ops.mixing.queries import queries_forward
    from tokenmix_oryx.ops.mixing.rates import rates_forward
    from tokenmix_oryx.ops.mixing.shared import shared_forward

    (B, T), E, H = attends.shape, rows.shape[1], len(A_log)
    rows, attends, places = _contiguous(rows, attends, places)
    A_log, dt_bias, k_weight, v_weight, norm_weight = _contiguous(A_log, dt_bias, k_weight, v_weight, norm_weight)
    k, v, gate, rates = _parts(shared, E)
    g, dt, beta = rates_forward(rates, A_log, dt_bias, D is None)
    q = queries_forward(rows, places, attends, cos, sin, H, (silu_attention, silu_linear, turn_linear))
    none = rows.new_empty(0)
    k_plain, k_turned, values = none, torch.empty_like(q), torch.empty_like(q)
    if not turn_linear:
        k_plain = torch.empty_like(q)
    shared_forward(k, k_weight, H, cu_seqlens, silu_shared, None if turn_linear else k_plain, k_turned, (cos, sin))
    shared_forward(v, v_weight, H, cu_seqlens, silu_shared, values)
    read = q, k_turned, k_turned if turn_linear else k_plain, values
    q4, k4, kl4, v4 = (x.view(B, T, H, -1) for x in read)
    o, lse = attention_forward(q4, k4, v4, cu_seqlens, CAUSAL, (E // H) ** -0.5, attends, fill=False, impl=impl)
    o_linear, saved = _linear_forward(q4, kl4, v4, g, dt, D, beta, cu_seqlens, impl)
    y = output_forward(
        o.view(-1, E), o_linear.view(-1, E), gate.view(-1, E), norm_weight, attends, groups, eps, gate_before
    )
    beta = rows.new_empty(0) if beta is None else beta
    s0, s1 = saved or (rows.new_empty(0), rows.new_empty(0))
    return y.view(B, T, E), q, k_turned, k_plain, values, o, lse, o_linear, g, dt, beta, s0, s1


mix_op = recorded_op("tokenmix_oryx::mix", _forward, mutates_args=())


@mix_op.register_fake
def _(
    rows, shared, A_log, dt_bias, D, k_weight, v_weight, norm_weight, places, attends, cos, sin, cu_seqlens,
    silu_shared, silu_attention, silu_linear, turn_linear, gate_before, groups, eps,
    impl=None,
):  # fmt: skip
    (B, T), E, H = attends.shape, rows.shape[1], len(A_log)
    heads = rows.new_empty(B, T, H, E // H)
    g = rows.new_empty(B, T, H, dtype=torch.float32)
    saved = rows.new_empty(0), rows.new_empty(0)
    if D is None:
        _, _, *saved = delta_rule.chunk_op(
            q=heads, k=heads, v=heads, g=g, beta=g, initial_state=None, cu_seqlens=cu_seqlens, scale=1.0,
            qk_l2norm=True, impl=impl,
        )  # fmt: skip
    plain = rows.new_empty(0 if turn_linear else rows.shape)
    o, lse = rows.new_empty(B, T, H, E // H), rows.new_empty(B, H, T, dtype=torch.float32)
    beta = rows.new_empty(0) if D is not None else torch.empty_like(g)
    return (
        rows.new_empty(B, T, E), rows.new_empty(rows.shape), rows.new_empty(rows.shape), plain,
        rows.new_empty(rows.shape), o, lse, torch.empty_like(o), g, torch.empty_like(g), beta, *saved,
    )  # fmt: skip


@retried
def _backward(
    rows: Tensor, shared: Tensor, A_log: Tensor, dt_bias: Tensor, D: Tensor | None, k_weight: Tensor, v_weight: Tensor,
    norm_weight: Tensor, places: Tensor | None, attends: Tensor, cos: Tensor, sin: Tensor, cu_seqlens: Tensor | None,
    q: Tensor, k_turned: Tensor, k_plain: Tensor, values: Tensor, o: Tensor, lse: Tensor, o_linear: Tensor,
    g: Tensor, dt: Tensor, beta: Tensor, saved_0: Tensor, saved_1: Tensor, dy: Tensor,
    silu_shared: bool, silu_attention: bool, silu_linear: bool, turn_linear: bool, gate_before: bool, groups: int,
    eps: float, impl: str | None = None,
) -> list[Tensor]:  # fmt: skip
    """Gradients of the first eight arguments, those that there are."""
    from tokenmix_core.ops.softmax_attention.backward import attention_backward
    from tokenmix_oryx.ops.mixing.output import output_backward
    from tokenmix_oryx.ops.mixing.queries import queries_backward
    from tokenmix_oryx.ops.mixing.rates import rates_backward
    from tokenmix_oryx.ops.mixing.shared import shared_backward

    (B, T), E, H = attends.shape, rows.shape[1], len(A_log)
    rows, attends, places = _contiguous(rows, attends, places)
    A_log, dt_bias, k_weight, v_weight, norm_weight = _contiguous(A_log, dt_bias, k_weight, v_weight, norm_weight)
    k, v, gate, rates = _parts(shared, E)
    dshared = shared.new_empty(shared.shape)
    dk, dv, dgate, drates = _parts(dshared, E)
    do, do_linear, dnorm = output_backward(
        o.view(-1, E), o_linear.view(-1, E), gate.view(-1, E), norm_weight, attends, token_rows(dy).view(-1, E),
        dgate.view(-1, E), groups, eps, gate_before,
    )  # fmt: skip
    read = q, k_turned, k_turned if turn_linear else k_plain, values, do, do_linear
    q4, k4, kl4, v4, do4, dol4 = (x.view(B, T, H, -1) for x in read)
    dq, *grads = attention_backward(
        q4, k4, v4, o, lse, do4, None, cu_seqlens, CAUSAL, (E // H) ** -0.5, attends, fill=False, impl=impl
    )
    beta = None if D is not None else beta
    saved = saved_0, saved_1
    dq_linear, dk_linear, dv_linear, dg, ddt, dD, dbeta = _linear_backward(
        q4, kl4, v4, g, dt, D, beta, cu_seqlens, saved, dol4, impl
    )
    flags = (silu_attention, silu_linear, turn_linear)
    drows = queries_backward(rows, places, attends, cos, sin, dq, dq_linear, H, flags)
    dk_weight = shared_backward(
        k, k_weight, H, cu_seqlens, silu_shared, grads[0], dk_linear, dk, (cos, sin), turn_linear
    )
    dv_weight = shared_backward(v, v_weight, H, cu_seqlens, silu_shared, grads[1], dv_linear, dv)
    dA_log, ddt_bias = rates_backward(rates, A_log, dt_bias, dg, ddt, dbeta, drates)
    found = (drows, dshared, dA_log, ddt_bias, dD, dk_weight, dv_weight, dnorm)
    return [x for x in found if x is not None]


mix_backward_op = recorded_op("tokenmix_oryx::mix_backward", _backward, mutates_args=())
mix_backward = direct_when_eager(mix_backward_op, _backward)


@mix_backward_op.register_fake
def _(*inputs):
    return [x.new_empty(x.shape) for x in inputs[:8] if x is not None]


def _save(ctx, inputs, output) -> None:
    tensors, ctx.options = inputs[:13], inputs[13:]
    ctx.save_for_backward(*tensors, *output[1:])
    ctx.set_materialize_grads(False)


def _gradients(ctx, dy, *_):
    if dy is None:
        return (None,) * 21
    # asked for once: activations that are recomputed are there only once
    saved = ctx.saved_tensors
    grads = iter(mix_backward(*saved, dy, *ctx.options))
    return *(None if x is None else next(grads) for x in saved[:8]), *(None,) * 13


mix = differentiable(mix_op, _forward, _save, _gradients, outputs=1)
