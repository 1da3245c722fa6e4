"""A decoding step of Gated DeltaNet: public function, checks, and the reference in eager PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from tokenmix_core.kernels.launch.cache.replay import Checked
from tokenmix_core.ops.causal_conv1d.reference import short_conv_step_reference
from tokenmix_core.ops.checks import bind_shapes, check_dtype, check_multiple, check_same_dtype, check_scale
from tokenmix_core.ops.dispatch import resolve_impl
from tokenmix_core.ops.fused.gdn_gates import delta_gates_reference
from tokenmix_core.ops.fused.rms_norm import gated_rms_norm_reference
from tokenmix_core.ops.gated_delta_rule.reference import recurrent_reference
from tokenmix_core.ops.slots import at_slots, check_spacing, check_written, first_axis, state_dtypes
from tokenmix_core.ops.types import Impl

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
# row counts and column counts of the heads of `state` (padded or split, as in `nn.HeadFit`) that the kernel supports
_SIZES = (64, 128, 256)


@torch.no_grad()
def delta_layer_step(
    q: Float[Tensor, "B H K"],
    k: Float[Tensor, "B H K"],
    v: Float[Tensor, "B HV V"],
    a: Float[Tensor, "B HV"],
    b: Float[Tensor, "B HV"],
    gate: Float[Tensor, "B HV V"] | None,
    weights: Sequence[Float[Tensor, "_channels W"]],
    inputs: Sequence[Float[Tensor, "_rows _channels W_minus_1"]],
    A_log: Float[Tensor, "HV"],
    dt_bias: Float[Tensor, "HV"],
    norm_weight: Float[Tensor, "V"],
    state: Float[Tensor, "_rows heads rows columns"],
    arrivals: Int[Tensor, "_rows H"],
    *,
    slots: Int[Tensor, "B"] | None = None,
    scale: float | None = None,
    max_beta: float = 1.0,
    eps: float = 1e-6,
    impl: Impl | None = None,
) -> Float[Tensor, "B HV V"]:
    r"""Compute a decoding step of Gated DeltaNet between its input and output projections. Not differentiable.

    One launch applies the convolutions with SiLU, scales q and k to unit length (q̂, k̂), computes g and β (see
    `delta_gates`), and then computes for each head (Yang et al. 2025):

    .. math::

        S \leftarrow e^{g} S + \beta\, \hat k\, (v - e^{g} S^\top \hat k)^\top, \qquad
        y = \text{norm}(\text{scale} \cdot S^\top \hat q) \odot \text{norm\_weight} \odot \text{silu}(\text{gate})

    Args:
        q, k, v: the projections of one token of each sequence, before their convolutions. H divides HV.
        a, b: projections from which `delta_gates` computes g and β.
        gate: the projection whose SiLU multiplies the normalised outputs; None for no gate.
        weights: weights of the convolutions of q, k and v: `[H · K, W]` twice and `[HV · V, W]`, W from 2 to 8, of one
            dtype.
        inputs: the convolutions' last W − 1 inputs, oldest first, `[B, H · K, W − 1]` twice and `[B, HV · V, W − 1]`,
            contiguous; this token's inputs replace the oldest. `inputs`, q, k, v and gate share one dtype: bfloat16,
            float16 or float32 (the reference also float64).
        A_log, dt_bias: parameters of the gates.
        norm_weight: weight of the norm.
        state: float32, contiguous, overwritten with the state after this token: HV heads `[K, V]`; or, as in
            `nn.HeadFit`, with the rows of a head padded with zeros, and its columns padded and split over several heads
            of equal size.
        arrivals: counters of finished programs, int32, contiguous, all zero; each launch resets them to zero. Only
            calls that share a state may share them.
        slots: int32 or int64 `[B]`. `inputs`, `state` and `arrivals` are then pools `[S, ...]`, and row n reads and
            overwrites slot `slots[n]` of each; a row with a negative slot is padding: its y is zero, and it reads and
            writes no slot. No two rows may have the same slot, unless it is negative. The slots of a pool may be any
            distance apart, and the pool of states may also be bfloat16 or float16: it rounds the state once per token.
            None: row n has the n-th state.
        scale: factor on the outputs before their norm; None: K ** −0.5.
        max_beta: as for `delta_gates`.
        eps: added to the mean square.
        impl: "triton" (sizes of the state's heads are 64, 128 or 256), "reference" (any device), or None: Triton for
            CUDA tensors, else the reference.

    Returns:
        y, in v's dtype.

    Raises:
        ValueError: shapes, dtypes, devices or sizes do not fit.
    """
    op = "delta_layer_step"
    if len(weights) != 3 or len(inputs) != 3:
        raise ValueError(f"{op}: q, k and v take three weights and last inputs, got {len(weights)} and {len(inputs)}")
    parameters = A_log, dt_bias, norm_weight
    impl, scale = _check(op, q, k, v, a, b, gate, *weights, *inputs, *parameters, state, arrivals, slots, scale, impl)
    if impl == "reference":
        reference = partial(delta_layer_step_reference, weights, *parameters, scale, max_beta, eps)
        return at_slots(reference, slots, (q, k, v, a, b, gate), (*inputs, state))
    from tokenmix_core.ops.fused.gdn_decode_kernel import step

    return step(q, k, v, a, b, gate, *weights, *inputs, *parameters, state, arrivals, scale, max_beta, eps, slots)


@Checked
def _check(
    op, q, k, v, a, b, gate, q_weight, k_weight, v_weight, q_inputs, k_inputs, v_inputs, A_log, dt_bias, norm_weight,
    state, arrivals, slots, scale, impl,
) -> tuple[str | None, float]:  # fmt: skip
    """Validate a call; return the implementation that `resolve_impl` selects, and the scale."""
    tensors = {"q": (q, "B H K"), "k": (k, "B H K"), "v": (v, "B HV V"), "a": (a, "B HV"), "b": (b, "B HV")}
    tensors |= {"gate": (gate, "B HV V?"), "q_weight": (q_weight, "keys W"), "k_weight": (k_weight, "keys W")}
    tensors |= {"v_weight": (v_weight, "values W"), "A_log": (A_log, "HV"), "dt_bias": (dt_bias, "HV")}
    first = first_axis(slots)
    tensors |= {"norm_weight": (norm_weight, "V"), "state": (state, f"{first} heads rows columns")}
    tensors |= {"arrivals": (arrivals, f"{first} H"), "slots": (slots, "B?")}
    dims = bind_shapes(op, {}, q=(q, "B H K"), v=(v, "B HV V"))
    dims |= {"keys": dims["H"] * dims["K"], "values": dims["HV"] * dims["V"]}
    bind_shapes(op, dims, **tensors)
    if not 2 <= dims["W"] <= 8:
        raise ValueError(f"{op}: weights must have a width W from 2 to 8, got {dims['W']}")
    dims["W-1"] = dims["W"] - 1
    inputs = {"q_inputs": (q_inputs, f"{first} keys W-1"), "k_inputs": (k_inputs, f"{first} keys W-1")}
    bind_shapes(op, dims, q=(q, "B H K"), **inputs, v_inputs=(v_inputs, f"{first} values W-1"))
    check_multiple(op, "HV", dims["HV"], "H", dims["H"])
    check_multiple(op, "heads of the state", dims["heads"], "HV", dims["HV"])
    if dims["rows"] < dims["K"] or dims["columns"] * (dims["heads"] // dims["HV"]) < dims["V"]:
        raise ValueError(
            f"{op}: state must hold heads of {dims['K']} × {dims['V']}, got {list(state.shape)} for {dims['HV']} heads"
        )
    impl = resolve_impl(op, impl, q)
    if impl != "reference" and not {dims["rows"], dims["columns"]} <= set(_SIZES):
        raise ValueError(
            f"{op}: impl='triton' takes a state of heads of 64, 128 or 256 by 64, 128 or 256, got {list(state.shape)}; "
            "pad the heads, or pass impl='reference'"
        )
    wide = (torch.float64,) if impl == "reference" else ()
    check_dtype(op, (*_FLOATS, *wide), q=q, a=a, b=b, q_weight=q_weight)
    check_dtype(op, (*_FLOATS, *wide), A_log=A_log, dt_bias=dt_bias, norm_weight=norm_weight)
    check_same_dtype(op, q=q, k=k, v=v, gate=gate, q_inputs=q_inputs, k_inputs=k_inputs, v_inputs=v_inputs)
    check_same_dtype(op, q_weight=q_weight, k_weight=k_weight, v_weight=v_weight)
    check_dtype(op, (*state_dtypes(slots), *wide), state=state)
    check_dtype(op, (torch.int32,), arrivals=arrivals)
    last = {"q_inputs": q_inputs, "k_inputs": k_inputs, "v_inputs": v_inputs}
    check_written(op, slots, **last, state=state, arrivals=arrivals)
    check_spacing(op, slots, state, impl)
    return impl, dims["K"] ** -0.5 if scale is None else check_scale(op, scale)


def delta_layer_step_reference(
    weights: Sequence[Tensor], A_log: Tensor, dt_bias: Tensor, norm_weight: Tensor, scale: float, max_beta: float,
    eps: float, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, gate: Tensor | None, *written: Tensor,
) -> Tensor:  # fmt: skip
    """Compute `delta_layer_step` in torch operations: return y, and overwrite the tensors in `written`.

    `written` holds the last inputs of the convolutions of q, k and v, then the state.
    """
    *inputs, state = written
    q, k, v = (
        short_conv_step_reference(weight, None, "silu", x.flatten(1), last).view_as(x)
        for x, weight, last in zip((q, k, v), weights, inputs, strict=True)
    )
    g, beta = delta_gates_reference(a, b, A_log, dt_bias, max_beta)
    (HV, V), (K, columns) = v.shape[1:], state.shape[2:]
    # a head of v may be split over several adjacent heads of the state: join their columns and drop the padding
    parts = state.unflatten(1, (HV, -1))
    whole = parts.transpose(2, 3).flatten(3)[..., : q.shape[2], :V]
    token = (x.unsqueeze(1) for x in (q, k, v, g, beta))
    o, after = recurrent_reference(*token, scale, whole, qk_l2norm=True)
    after = F.pad(after, (0, parts.shape[2] * columns - V, 0, K - q.shape[2]))
    parts.copy_(after.unflatten(3, (-1, columns)).transpose(2, 3))
    return gated_rms_norm_reference(o.squeeze(1), gate, norm_weight, eps, "after", V, v.dtype)
