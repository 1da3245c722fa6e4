"""The fused `mix` and its gradients: called directly in eager mode, as custom ops under torch.compile."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenmix_core.ops import cached_op, differentiable, direct_when_eager, of_fields, retried, token_rows, zero_padding
from tokenmix_core.ops import delta_rule_autograd as delta_rule
from tokenmix_core.ops import ssd_autograd as ssd
from tokenmix_oryx.ops.selected_queries.autograd import CAUSAL

# the first _DIFFERENTIABLE inputs are differentiable; the first _TENSORS inputs are tensors, all others are options
_DIFFERENTIABLE, _TENSORS = 8, 13


class Inputs(NamedTuple):
    """The arguments of `mix`; angles are `[BR · T, K / 2]`: BR = 1 if all sequences have equal angles, else B."""

    rows: Tensor
    shared: Tensor
    A_log: Tensor
    dt_bias: Tensor
    D: Tensor | None
    k_weight: Tensor
    v_weight: Tensor
    norm_weight: Tensor
    row_ids: Tensor | None
    attends: Tensor
    cos: Tensor
    sin: Tensor
    cu_seqlens: Tensor | None
    silu_shared: bool
    silu_attention_query: bool
    silu_linear_query: bool
    rotate_linear: bool
    gate_before: bool
    groups: int
    eps: float
    impl: str | None

    def readable(self) -> Inputs:
        """Return the inputs as kernels read them: rows, weights, flags contiguous, slices of `shared` as they are."""
        names = "rows", "A_log", "dt_bias", "k_weight", "v_weight", "norm_weight", "row_ids", "attends"
        return self._replace(**{name: t.contiguous() for name in names if (t := getattr(self, name)) is not None})


class Kept(NamedTuple):
    """The tensors saved for the backward; those that do not exist for the layer's options are empty.

    Attributes:
        q, k_rotated, k_plain, values: inputs of the mixers, `[N, E]`; k_plain is used if the linear mixer is not
            rotated.
        o, lse: outputs and log-sum-exp of attention for the tokens in attention mode.
        o_linear, g, dt, beta: outputs and rates of the linear mixer; saved_0 and saved_1 are the tensors it has saved.
    """

    q: Tensor
    k_rotated: Tensor
    k_plain: Tensor
    values: Tensor
    o: Tensor
    lse: Tensor
    o_linear: Tensor
    g: Tensor
    dt: Tensor
    beta: Tensor
    saved_0: Tensor
    saved_1: Tensor


class Outputs(NamedTuple):
    """y `[B, T, E]`, and the tensors saved for the backward."""

    y: Tensor
    kept: Kept


class BackwardInputs(NamedTuple):
    """The arguments of the backward: those of the forward, its saved tensors, and the gradient of y."""

    inputs: Inputs
    kept: Kept
    dy: Tensor


def _padded_heads(*heads: Tensor) -> tuple[Tensor, ...]:
    """Pad the channels of heads with zeros to sizes for which SSD's gradients are exact."""
    K = heads[0].shape[-1]
    return tuple(F.pad(x, (0, 64 - K)) for x in heads) if ssd.needs_widening(heads[0], K) else heads


def _linear_forward(q, k, v, *, g, dt, D, beta, cu_seqlens, impl) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return the linear mixer's outputs for all tokens, and the tensors that its backward needs."""
    K = q.shape[-1]
    if beta is None:
        q, k, v = _padded_heads(q, k, v)
        o, *_ = ssd.run_forward(
            q=q, k=k, v=v, g=g, scale=1.0, initial_state=None, cu_seqlens=cu_seqlens, dt=dt, D=D, impl=impl
        )
        return o[..., :K].contiguous(), ()
    o, _, *terms = delta_rule.run_forward(
        q=q, k=k, v=v, g=g, beta=beta, initial_state=None, writes=None, cu_seqlens=cu_seqlens, scale=K**-0.5,
        qk_l2norm=True, impl=impl,
    )  # fmt: skip
    return o, tuple(terms)


def _linear_backward(q, k, v, *, g, dt, D, beta, cu_seqlens, saved, do, impl) -> tuple[Tensor | None, ...]:
    """Return dq, dk, dv, dg, dΔ, dD and dβ of the linear mixer; None for an input that it does not have."""
    K = q.shape[-1]
    if beta is None:
        q, k, v, do = _padded_heads(q, k, v, do)
        *grads, dg, _, ddt, dD = ssd.run_backward(
            q=q, k=k, v=v, g=g, scale=1.0, initial_state=None, cu_seqlens=cu_seqlens, entering=None, do=do,
            dfinal_state=None, dt=dt, D=D, impl=impl,
        )  # fmt: skip
        dq, dk, dv = (x[..., :K].contiguous() for x in grads)
        return dq, dk, dv, dg, ddt, dD, None
    inverse, gates = saved
    dq, dk, dv, dg, dbeta, *_ = delta_rule.run_backward(
        do=do, dfinal_state=None, q=q, k=k, v=v, g=g, beta=beta, inverse=inverse, gates=gates, initial_state=None,
        writes=None, cu_seqlens=cu_seqlens, scale=K**-0.5, qk_l2norm=True, impl=impl,
    )  # fmt: skip
    return dq, dk, dv, dg, None, None, dbeta


def _parts(shared: Tensor, E: int) -> tuple[Tensor, ...]:
    """Split the shared projections into k, v, gate and rates."""
    shared = token_rows(shared)
    return shared.split((E, E, E, shared.shape[-1] - 3 * E), -1)


def _last(x: Inputs) -> Tensor | None:
    """Return the last boundary of a packed batch, at which padding begins; None if there are no boundaries."""
    return None if x.cu_seqlens is None else x.cu_seqlens[-1:]


@retried
@of_fields
def _forward(x: Inputs) -> Outputs:
    """Compute rates, queries, keys and values, then both mixers, then the gated, normalised output of each token."""
    from tokenmix_core.ops import attention_forward
    from tokenmix_oryx.ops.mixing.output import output_forward
    from tokenmix_oryx.ops.mixing.queries import queries_forward
    from tokenmix_oryx.ops.mixing.rates import rates_forward
    from tokenmix_oryx.ops.mixing.shared import shared_forward

    (B, T), E, H = x.attends.shape, x.rows.shape[1], len(x.A_log)
    x = x.readable()
    k, v, gate, rates = _parts(x.shared, E)
    g, dt, beta = rates_forward(rates, x.A_log, x.dt_bias, with_beta=x.D is None)
    q = queries_forward(
        rows=x.rows, row_ids=x.row_ids, attends=x.attends, cos=x.cos, sin=x.sin, H=H,
        silu_attention=x.silu_attention_query, silu_linear=x.silu_linear_query, rotate_linear=x.rotate_linear,
    )  # fmt: skip
    k_rotated, values = torch.empty_like(q), torch.empty_like(q)
    k_plain = None if x.rotate_linear else torch.empty_like(q)
    options = dict(H=H, cu_seqlens=x.cu_seqlens, silu=x.silu_shared)
    shared_forward(k, x.k_weight, y=k_plain, rotated=k_rotated, angles=(x.cos, x.sin), **options)
    shared_forward(v, x.v_weight, y=values, **options)
    k_linear = k_rotated if k_plain is None else k_plain
    q4, k4, kl4, v4 = (t.view(B, T, H, -1) for t in (q, k_rotated, k_linear, values))
    o, lse = attention_forward(
        q=q4, k=k4, v=v4, cu_seqlens=x.cu_seqlens, mask=CAUSAL, scale=(E // H) ** -0.5, selected=x.attends, fill=False,
        impl=x.impl,
    )  # fmt: skip
    o_linear, saved = _linear_forward(
        q4, kl4, v4, g=g, dt=dt, D=x.D, beta=beta, cu_seqlens=x.cu_seqlens, impl=x.impl
    )  # fmt: skip
    y = output_forward(
        o_attention=o.view(-1, E), o_linear=o_linear.view(-1, E), gate=gate.view(-1, E), weight=x.norm_weight,
        attends=x.attends, last=_last(x), groups=x.groups, eps=x.eps, before=x.gate_before,
    )  # fmt: skip
    # fields without a tensor get distinct empty ones, because outputs of custom ops must be distinct tensors
    k_plain, beta, saved_0, saved_1 = (
        x.rows.new_empty(0) if t is None else t for t in (k_plain, beta, *(saved or (None, None)))
    )
    kept = Kept(
        q=q, k_rotated=k_rotated, k_plain=k_plain, values=values, o=o, lse=lse, o_linear=o_linear, g=g, dt=dt,
        beta=beta,
        saved_0=saved_0, saved_1=saved_1,
    )  # fmt: skip
    return Outputs(y.view(B, T, E), kept)


def _empty_outputs(x: Inputs) -> Outputs:
    (B, T), E, H = x.attends.shape, x.rows.shape[1], len(x.A_log)
    heads, like_rows = (B, T, H, E // H), x.rows.shape
    g = x.rows.new_empty(B, T, H, dtype=torch.float32)
    saved = x.rows.new_empty(0), x.rows.new_empty(0)
    if x.D is None:
        q = x.rows.new_empty(heads)
        _, _, *saved = delta_rule.chunk_op(
            q=q, k=q, v=q, g=g, beta=g, initial_state=None, writes=None, cu_seqlens=x.cu_seqlens, scale=1.0,
            qk_l2norm=True, impl=x.impl,
        )  # fmt: skip
    kept = Kept(
        q=x.rows.new_empty(like_rows), k_rotated=x.rows.new_empty(like_rows),
        k_plain=x.rows.new_empty(0 if x.rotate_linear else like_rows), values=x.rows.new_empty(like_rows),
        o=x.rows.new_empty(heads), lse=x.rows.new_empty(B, H, T, dtype=torch.float32), o_linear=x.rows.new_empty(heads),
        g=g, dt=torch.empty_like(g), beta=x.rows.new_empty(0) if x.D is not None else torch.empty_like(g),
        saved_0=saved[0], saved_1=saved[1],
    )  # fmt: skip
    return Outputs(x.rows.new_empty(B, T, E), kept)


@retried
@of_fields
def _backward(given: BackwardInputs) -> list[Tensor]:
    """Return the gradients of those of the first eight inputs that are not None, by the forward's steps in reverse."""
    from tokenmix_core.ops import attention_backward
    from tokenmix_oryx.ops.mixing.output import output_backward
    from tokenmix_oryx.ops.mixing.queries import queries_backward
    from tokenmix_oryx.ops.mixing.rates import rates_backward
    from tokenmix_oryx.ops.mixing.shared import shared_backward

    x, kept = given.inputs.readable(), given.kept
    (B, T), E, H = x.attends.shape, x.rows.shape[1], len(x.A_log)
    k, v, gate, rates = _parts(x.shared, E)
    dshared = x.shared.new_empty(x.shared.shape)
    dk, dv, dgate, drates = _parts(dshared, E)
    do, do_linear, dnorm = output_backward(
        o_attention=kept.o.view(-1, E), o_linear=kept.o_linear.view(-1, E), gate=gate.view(-1, E), weight=x.norm_weight,
        attends=x.attends, dy=token_rows(given.dy).view(-1, E), dgate=dgate.view(-1, E), last=_last(x),
        groups=x.groups, eps=x.eps, before=x.gate_before,
    )  # fmt: skip
    read = kept.q, kept.k_rotated, kept.k_rotated if x.rotate_linear else kept.k_plain, kept.values, do, do_linear
    q4, k4, kl4, v4, do4, dol4 = (t.view(B, T, H, -1) for t in read)
    dq, dk_attention, dv_attention = attention_backward(
        q=q4, k=k4, v=v4, o=kept.o, lse=kept.lse, do=do4, dlse=None, cu_seqlens=x.cu_seqlens, mask=CAUSAL,
        scale=(E // H) ** -0.5, selected=x.attends, fill=False, impl=x.impl,
    )  # fmt: skip
    dq_linear, dk_linear, dv_linear, dg, ddt, dD, dbeta = _linear_backward(
        q4, kl4, v4, g=kept.g, dt=kept.dt, D=x.D, beta=None if x.D is not None else kept.beta, cu_seqlens=x.cu_seqlens,
        saved=(kept.saved_0, kept.saved_1), do=dol4, impl=x.impl,
    )  # fmt: skip
    drows = queries_backward(
        rows=x.rows, row_ids=x.row_ids, attends=x.attends, cos=x.cos, sin=x.sin, dq_attention=dq, dq_linear=dq_linear,
        last=_last(x), H=H, silu_attention=x.silu_attention_query, silu_linear=x.silu_linear_query,
        rotate_linear=x.rotate_linear,
    )  # fmt: skip
    options = dict(H=H, cu_seqlens=x.cu_seqlens, silu=x.silu_shared)
    dk_weight = shared_backward(
        k, x.k_weight, dattention=dk_attention, dlinear=dk_linear, dx=dk, angles=(x.cos, x.sin),
        rotate_linear=x.rotate_linear, **options,
    )  # fmt: skip
    dv_weight = shared_backward(v, x.v_weight, dattention=dv_attention, dlinear=dv_linear, dx=dv, **options)
    dA_log, ddt_bias = rates_backward(
        x=rates, A_log=x.A_log, bias=x.dt_bias, dg=dg, ddt=ddt, dbeta=dbeta, dx=drates, last=_last(x)
    )  # fmt: skip
    zero_padding(x.cu_seqlens, dshared)
    found = (drows, dshared, dA_log, ddt_bias, dD, dk_weight, dv_weight, dnorm)
    return [grad for grad in found if grad is not None]


def _save(ctx, inputs, output) -> None:
    _, *kept = output
    ctx.options = inputs[_TENSORS:]
    ctx.save_for_backward(*inputs[:_TENSORS], *kept)
    ctx.set_materialize_grads(False)


def _gradients(ctx, dy, *_):
    if dy is None:
        return (None,) * len(Inputs._fields)
    # read `saved_tensors` once only: under gradient checkpointing every access computes the tensors again
    saved = ctx.saved_tensors
    grads = iter(mix_backward(*saved[:_TENSORS], *ctx.options, *saved[_TENSORS:], dy))
    found = (None if t is None else next(grads) for t in saved[:_DIFFERENTIABLE])
    return *found, *[None] * (len(Inputs._fields) - _DIFFERENTIABLE)


mix_op = cached_op("tokenmix_oryx::mix", _forward, _empty_outputs)
mix_backward_op = cached_op(
    "tokenmix_oryx::mix_backward",
    _backward,
    lambda given: [t.new_empty(t.shape) for t in given.inputs[:_DIFFERENTIABLE] if t is not None],
)
mix_backward = direct_when_eager(mix_backward_op, _backward)
mix = differentiable(mix_op, _forward, _save, _gradients, outputs=1)
