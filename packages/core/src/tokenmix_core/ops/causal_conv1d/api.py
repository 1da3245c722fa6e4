"""The short convolution: public functions, validation and dispatch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tokenmix_core.kernels.launch.cache.replay import Checked
from tokenmix_core.ops.causal_conv1d.reference import short_conv_reference, short_conv_step_reference
from tokenmix_core.ops.checks import bind_shapes, check_cu_seqlens, check_dtype, check_same_dtype
from tokenmix_core.ops.dispatch import resolve_impl
from tokenmix_core.ops.slots import (
    Pool,
    at_slots,
    check_pool,
    check_written,
    first_axis,
    refuse_gradients,
    scan_at_slots,
)
from tokenmix_core.ops.types import Impl, ScanOutput

Activation = Literal["silu"]
FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def short_conv(
    x: Float[Tensor, "B T D"],
    weight: Float[Tensor, "D W"],
    bias: Float[Tensor, "D"] | None = None,
    *,
    activation: Activation | None = None,
    initial_state: Float[Tensor, "N D W_minus_1"] | None = None,
    cu_seqlens: Int[Tensor, "N_plus_1"] | None = None,
    impl: Impl | None = None,
) -> ScanOutput:
    r"""Convolve x over time, causally and depthwise, with an optional SiLU; sequences of a packed batch never mix.

    .. math:: o_{t,d} = \phi\Big(\text{bias}_d + \sum_{w=0}^{W-1} \text{weight}_{d,w}\; x_{t-W+1+w,\,d}\Big)

    Inputs before the first token come from `initial_state`, oldest first, or are zero. Differentiable in every tensor
    argument and through both results.

    Args:
        x: `[B, T, D]`, bfloat16, float16 or float32 (the reference also float64).
        weight: `[D, W]` with W from 2 to 8; its last column weighs the newest input.
        bias: `[D]` or None. weight and bias share one float dtype, which may differ from x's.
        activation: None or "silu".
        initial_state: `[N, D, W − 1]` in x's dtype: the inputs that precede each sequence, oldest first.
        cu_seqlens: `[N + 1]` int32 or int64, the boundaries of N sequences packed into one row (B = 1).
        impl: "triton", "reference" (any device), or None: Triton for CUDA tensors, the reference for others. There are
            no Gluon kernels, because the operation is bound by memory bandwidth.

    Returns:
        ScanOutput: o `[B, T, D]` and final_state `[N, D, W − 1]`, each sequence's last W − 1 inputs, both in x's dtype.

    Raises:
        ValueError: shapes, dtypes, devices, the activation or cu_seqlens do not match.
    """
    impl = _check(x, weight, bias, activation, initial_state, cu_seqlens, impl)
    if impl != "reference":
        from tokenmix_core.ops.causal_conv1d.autograd import convolution

        return ScanOutput(*convolution(x, weight, bias, activation, initial_state, cu_seqlens))
    return short_conv_reference(
        x, weight, bias, activation=activation, initial_state=initial_state, cu_seqlens=cu_seqlens
    )


def short_convs(
    xs: Sequence[Float[Tensor, "B T _channels"]],
    weights: Sequence[Float[Tensor, "_channels W"]],
    *,
    activation: Activation | None = None,
    initial_states: Sequence[Float[Tensor, "N _channels W_minus_1"]] | None = None,
    cu_seqlens: Int[Tensor, "N_plus_1"] | None = None,
    impl: Impl | None = None,
) -> tuple[ScanOutput, ...]:
    """Apply `short_conv` to two or three inputs of the same tokens, such as q, k and v, in one launch; without biases.

    Args:
        xs, weights: as for `short_conv`, with one dtype each and one W; D may differ.
        initial_states: one initial state for each input, or None for zero states.
        activation, cu_seqlens: as for `short_conv`.
        impl: as for `short_conv`.

    Returns:
        One ScanOutput per input.

    Raises:
        ValueError: as for `short_conv`; or the counts of inputs, weights and states differ, or their sizes do not fit.
    """
    _check_number("short_convs", xs, weights, xs if initial_states is None else initial_states)
    states = [None] * len(xs) if initial_states is None else initial_states
    backend = _check_several(len(xs), activation, cu_seqlens, impl, *xs, *weights, *states)
    if backend == "reference":
        options = {"activation": activation, "cu_seqlens": cu_seqlens, "impl": impl}
        inputs = zip(xs, weights, states, strict=True)
        return tuple(short_conv(x, weight, initial_state=state, **options) for x, weight, state in inputs)
    from tokenmix_core.ops.causal_conv1d.autograd import short_convs_triton

    return short_convs_triton(xs, weights, activation, initial_states, cu_seqlens)


def short_conv_prefill(
    x: Float[Tensor, "B T D"],
    weight: Float[Tensor, "D W"],
    bias: Float[Tensor, "D"] | None,
    state: Float[Tensor, "S D W_minus_1"],
    *,
    slots: Int[Tensor, "N"],
    fresh: Bool[Tensor, "N"] | None = None,
    activation: Activation | None = None,
    cu_seqlens: Int[Tensor, "N_plus_1"] | None = None,
    impl: Impl | None = None,
) -> Float[Tensor, "B T D"]:
    """Compute `short_conv` from and into slots of a pool of last inputs. Not differentiable.

    Args:
        x, weight, bias, activation, cu_seqlens, impl: as for `short_conv`.
        state: a pool `[S, D, W − 1]` in x's dtype.
        slots, fresh: as for `gated_delta_rule_prefill`.

    Returns:
        o `[B, T, D]` in x's dtype.

    Raises:
        ValueError: as for `short_conv` and `gated_delta_rule_prefill`.
    """
    op = "short_conv_prefill"
    return _prefill(op, [x], [weight], bias, [state], slots, fresh, activation, cu_seqlens, impl)[0]


def short_convs_prefill(
    xs: Sequence[Float[Tensor, "B T _channels"]],
    weights: Sequence[Float[Tensor, "_channels W"]],
    states: Sequence[Float[Tensor, "S _channels W_minus_1"]],
    *,
    slots: Int[Tensor, "N"],
    fresh: Bool[Tensor, "N"] | None = None,
    activation: Activation | None = None,
    cu_seqlens: Int[Tensor, "N_plus_1"] | None = None,
    impl: Impl | None = None,
) -> tuple[Tensor, ...]:
    """Apply `short_conv_prefill` to two or three inputs, such as q, k and v, in one launch; without biases.

    Args:
        xs, weights, states: as for `short_conv_prefill`, with one dtype each and one W; D may differ.
        slots, fresh: as for `short_conv_prefill`; all pools have the same slots.
        activation, cu_seqlens, impl: as for `short_conv`.

    Returns:
        One tensor o `[B, T, D]` per input.

    Raises:
        ValueError: as for `short_conv_prefill`; or the counts of inputs, weights and states differ, or sizes do not
            fit.
    """
    op = "short_convs_prefill"
    _check_number(op, xs, weights, states)
    return tuple(_prefill(op, xs, weights, None, states, slots, fresh, activation, cu_seqlens, impl))


def _prefill(op, xs, weights, bias, states, slots, fresh, activation, cu_seqlens, impl) -> Sequence[Tensor]:
    """Validate and compute a prefill of one to three inputs; only a single one may have a bias."""
    given = [*zip(xs, weights, states, strict=True)]
    for x, weight, state in given:
        refuse_gradients(op, x=x, weight=weight, bias=bias, state=state)
        backend = _check_prefill(x, weight, bias, state, slots, fresh, activation, cu_seqlens, impl)
    _check_alike(op, xs, weights)
    if backend != "reference":
        from tokenmix_core.ops.causal_conv1d.autograd import prefill_triton

        return prefill_triton(xs, weights, bias, states, slots, fresh, activation, cu_seqlens)
    outputs = []
    for x, weight, state in given:
        run = partial(short_conv_reference, x, weight, bias, activation=activation, cu_seqlens=cu_seqlens)
        outputs.append(scan_at_slots(lambda before, run=run: run(initial_state=before), Pool(state, slots, fresh)))
    return outputs


@torch.no_grad()
def short_conv_step(
    x: Float[Tensor, "B D"],
    weight: Float[Tensor, "D W"],
    bias: Float[Tensor, "D"] | None,
    state: Float[Tensor, "_rows D W_minus_1"],
    *,
    slots: Int[Tensor, "B"] | None = None,
    activation: Activation | None = None,
    impl: Impl | None = None,
) -> Float[Tensor, "B D"]:
    """Run one decoding step: convolve `x` and the inputs in `state`, and append `x` to `state`. Not differentiable.

    Args:
        x: `[B, D]`, one token.
        weight, bias, activation, impl: as for `short_conv`.
        state: `[B, D, W − 1]` in x's dtype, contiguous: the last W − 1 inputs, oldest first; overwritten so that x is
            the newest.
        slots: as for `gated_delta_rule_step`: row n reads and overwrites slot `slots[n]` of the pool
            `state [S, D, W − 1]`.

    Returns:
        o `[B, D]` in x's dtype.

    Raises:
        ValueError: as for `short_conv`; or the state is not contiguous, or slots do not fit.
    """
    return _steps([x], [weight], bias, [state], slots, activation, impl)[0]


@torch.no_grad()
def short_conv_steps(
    xs: Sequence[Float[Tensor, "B _channels"]],
    weights: Sequence[Float[Tensor, "_channels W"]],
    states: Sequence[Float[Tensor, "_rows _channels W_minus_1"]],
    *,
    slots: Int[Tensor, "B"] | None = None,
    activation: Activation | None = None,
    impl: Impl | None = None,
) -> tuple[Tensor, ...]:
    """Apply `short_conv_step` to two or three inputs, such as q, k and v, in one launch; without biases.

    Args:
        xs, weights, states: as for `short_conv_step`; all xs share one dtype, all weights one dtype and one W; D may
            differ.
        slots: as for `short_conv_step`; all pools have the same slots.
        activation, impl: as for `short_conv`.

    Returns:
        One tensor o `[B, D]` per input.

    Raises:
        ValueError: as for `short_conv_step`; or the counts of inputs, weights and states differ, or sizes do not fit.
    """
    _check_number("short_conv_steps", xs, weights, states)
    return tuple(_steps(xs, weights, None, states, slots, activation, impl))


def _steps(xs, weights, bias, states, slots, activation, impl) -> Sequence[Tensor]:
    """Validate and compute a decoding step of one to three inputs; only a single one may have a bias."""
    given = [*zip(xs, weights, states, strict=True)]
    for x, weight, state in given:
        backend = _check_step(x, weight, bias, state, slots, activation, impl)
    _check_alike("short_conv_steps", xs, weights)
    if backend != "reference":
        from tokenmix_core.ops.causal_conv1d.autograd import steps_triton

        return steps_triton(xs, weights, bias, states, activation, slots)
    return [
        at_slots(partial(short_conv_step_reference, weight, bias, activation), slots, (x,), (state,))
        for x, weight, state in given
    ]


def _check_number(op: str, xs: Sequence, weights: Sequence, states: Sequence) -> None:
    """Raise a ValueError unless there are two or three inputs, with one weight and one state for each."""
    if not 2 <= len(xs) <= 3 or not len(xs) == len(weights) == len(states):
        raise ValueError(
            f"{op}: expected two or three inputs, with a weight and a state for each, "
            f"got {len(xs)}, {len(weights)} and {len(states)}"
        )


def _check_alike(op: str, xs: Sequence[Tensor], weights: Sequence[Tensor]) -> None:
    """Raise a ValueError unless inputs agree in B, T, W, dtypes and device, because one launch convolves them all."""
    if len(xs) == 1:
        return
    # make a list instead of a set, because under tracing sizes are symbols, which cannot be hashed
    kinds = [
        (*x.shape[:-1], x.dtype, x.device, weight.shape[1], weight.dtype) for x, weight in zip(xs, weights, strict=True)
    ]
    if any(kind != kinds[0] for kind in kinds):
        raise ValueError(
            f"{op}: inputs must have one B, T, W, dtype and device, got {' and '.join(sorted(set(map(str, kinds))))}"
        )


@Checked
def _check_several(number, activation, cu_seqlens, impl, *tensors) -> str | None:
    """Validate a call of `short_convs`; return the implementation, as `resolve_impl` does.

    `tensors` are the inputs, then their weights, then their initial states.
    """
    xs, weights, states = (tensors[i * number : (i + 1) * number] for i in range(3))
    for x, weight, state in zip(xs, weights, states, strict=True):
        # not `_check`, which would also store the signature of each input
        backend = _bind("short_conv", x, weight, None, activation, state, cu_seqlens, impl)[1]
    _check_alike("short_convs", xs, weights)
    return backend


@Checked
def _check(x, weight, bias, activation, initial_state, cu_seqlens, impl) -> str | None:
    """Validate a call on whole sequences; return the implementation, as `resolve_impl` does."""
    return _bind("short_conv", x, weight, bias, activation, initial_state, cu_seqlens, impl)[1]


@Checked
def _check_prefill(x, weight, bias, state, slots, fresh, activation, cu_seqlens, impl) -> str | None:
    """Validate a prefill in slots; return the implementation, as `resolve_impl` does."""
    op = "short_conv_prefill"
    dims, impl = _bind(op, x, weight, bias, activation, None, cu_seqlens, impl)
    check_pool(op, dims, (x, "B T D"), "D W-1", state=state, slots=slots, fresh=fresh)
    check_same_dtype(op, x=x, state=state)
    return impl


def _bind(op, x, weight, bias, activation, initial_state, cu_seqlens, impl) -> tuple[dict[str, int], str | None]:
    """Validate a call on whole sequences; return its sizes and the implementation."""
    dims = bind_shapes(op, {}, x=(x, "B T D"), weight=(weight, "D W"), bias=(bias, "D?"))
    impl = resolve_impl(op, impl, x)
    if dims["T"] < 1:
        raise ValueError(f"{op}: x must hold at least one token, got T = {dims['T']}")
    sequences = check_cu_seqlens(op, cu_seqlens, dims["B"], dims["T"])
    dims["N"] = dims["B"] if sequences is None else sequences
    _check_rest(op, impl, dims, x, weight, bias, activation, "N", initial_state=initial_state)
    bind_shapes(op, dims, x=(x, "B T D"), cu_seqlens=(cu_seqlens, "_?"))
    return dims, impl


@Checked
def _check_step(x, weight, bias, state, slots, activation, impl) -> str | None:
    """Validate a decoding step; return the implementation, as `resolve_impl` does."""
    op = "short_conv_step"
    dims = bind_shapes(op, {}, x=(x, "B D"), weight=(weight, "D W"), bias=(bias, "D?"), slots=(slots, "B?"))
    impl = resolve_impl(op, impl, x)
    _check_rest(op, impl, dims, x, weight, bias, activation, first_axis(slots), state=state)
    check_written(op, slots, state=state)
    return impl


def _check_rest(op, impl, dims, x, weight, bias, activation, rows, **state: Tensor | None) -> None:
    """Check W, the state's shape, the dtypes and the activation."""
    if not 2 <= dims["W"] <= 8:
        raise ValueError(f"{op}: weight must have a width W from 2 to 8, got {list(weight.shape)}")
    name, before = next(iter(state.items()))
    # replace W − 1 by its value, which error messages print; under tracing it may be a symbol
    dims["W-1"] = dims["W"] - 1
    spec = f"{rows} D W-1" + ("?" if name == "initial_state" else "")
    bind_shapes(op, dims, x=(x, "B T D" if x.dim() == 3 else "B D"), **{name: (before, spec)})
    floats = (*FLOATS, torch.float64) if impl == "reference" else FLOATS
    check_dtype(op, floats, x=x, weight=weight, bias=bias)
    check_same_dtype(op, weight=weight, bias=bias)
    check_same_dtype(op, x=x, **state)
    if activation not in (None, "silu"):
        raise ValueError(f"{op}: activation must be None or 'silu', got {activation!r}")
