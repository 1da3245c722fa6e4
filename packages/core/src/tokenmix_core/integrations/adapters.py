"""Our operations with the names and arguments of the functions that transformers' hybrid layers call.

The originals are in each family's `modeling_*.py`, under the names that `FUNCTIONS` lists. As in transformers, unknown
keyword arguments are ignored, except `cu_seq_lens_q` and `seq_idx`, the boundaries of packed documents, which are used.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from tokenmix_core import ops
from tokenmix_core.integrations import fitting
from tokenmix_core.integrations.separation import cu_seqlens_of, starts_of
from tokenmix_core.nn.dtypes import at_least_float32
from tokenmix_core.ops.dispatch import unless_gluon
from tokenmix_core.ops.gated_delta_rule.api import HEAD_SIZES as DELTA_SIZES
from tokenmix_core.ops.ssd.api import HEAD_SIZES as SSD_SIZES
from tokenmix_core.ops.types import Impl

_SILU = ("silu", "swish")


def causal_conv1d_fn(
    hidden_states: Float[Tensor, "B D T"],
    weight: Float[Tensor, "D W"],
    bias: Float[Tensor, "D"] | None = None,
    activation: str | None = None,
    *,
    impl: Impl | None = None,
    **call: Any,
) -> Float[Tensor, "B D T"]:
    """Convolve whole sequences causally with W taps.

    A layer that continues a sequence prepends the W inputs of its cache to its own, so that T includes them.
    """
    x = hidden_states.transpose(1, 2)
    rows, cu_seqlens = _packed(x, call)
    y = ops.short_conv(
        rows, weight, bias, activation=_fused(activation), cu_seqlens=cu_seqlens, impl=unless_gluon(impl)
    ).o.reshape(x.shape)
    return _activated(y, activation).transpose(1, 2)


def causal_conv1d_update(
    hidden_states: Float[Tensor, "B D 1"],
    conv_state: Float[Tensor, "B D S"],
    weight: Float[Tensor, "D W"],
    bias: Float[Tensor, "D"] | None = None,
    activation: str | None = None,
    *,
    impl: Impl | None = None,
    **call: Any,
) -> Float[Tensor, "B D 1"]:
    """Convolve one token of each sequence with W taps; update `conv_state`, which holds the last S ≥ W − 1 inputs."""
    x = hidden_states.transpose(1, 2)
    before = conv_state[..., 1 - weight.shape[1] :]
    y = ops.short_conv(
        x, weight, bias, activation=_fused(activation), initial_state=before.to(x.dtype), impl=unless_gluon(impl)
    ).o
    conv_state.copy_(torch.cat((conv_state[..., 1:], hidden_states), -1))
    return _activated(y, activation).transpose(1, 2)


def chunk_gated_delta_rule(
    query: Float[Tensor, "B T H K"],
    key: Float[Tensor, "B T H K"],
    value: Float[Tensor, "B T HV V"],
    g: Float[Tensor, "B T HV"],
    beta: Float[Tensor, "B T HV"],
    chunk_size: int = 64,
    initial_state: Float[Tensor, "B HV K V"] | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Int[Tensor, "N_plus_1"] | None = None,
    *,
    impl: Impl | None = None,
    **call: Any,
) -> tuple[Tensor, Tensor | None]:
    """Apply the gated delta rule to whole sequences; return outputs and the final states or None."""
    shape = value.shape
    query, cu_seqlens = _packed(query, call, cu_seqlens)
    key, value, g, beta = (x.reshape(*query.shape[:2], *x.shape[2:]) for x in (key, value, g, beta))
    _refuse_cache(cu_seqlens, initial_state, output_final_state)
    o, final = fitting.delta_rule(
        ops.chunk_gated_delta_rule, query, key, value, g, beta, scale=None, initial_state=_wide(initial_state, query),
        cu_seqlens=cu_seqlens, qk_l2norm=use_qk_l2norm_in_kernel, impl=impl,
    )  # fmt: skip
    return o.reshape(shape), final if output_final_state else None


def recurrent_gated_delta_rule(
    query: Float[Tensor, "B T H K"],
    key: Float[Tensor, "B T H K"],
    value: Float[Tensor, "B T HV V"],
    g: Float[Tensor, "B T HV"],
    beta: Float[Tensor, "B T HV"],
    initial_state: Float[Tensor, "B HV K V"] | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    *,
    impl: Impl | None = None,
    **call: Any,
) -> tuple[Tensor, Tensor | None]:
    """Apply the gated delta rule token by token; return the outputs and, if `output_final_state`, the final states.

    If T is 1, gradients are off, `initial_state` is contiguous and float32, and the heads need no fitting (`fitting`),
    the call overwrites `initial_state`.
    """
    if (
        initial_state is not None
        and query.shape[1] == 1
        and not torch.is_grad_enabled()
        and initial_state.dtype == torch.float32
        and initial_state.is_contiguous()
        and fitting.fits(query, value, DELTA_SIZES, impl)
    ):
        q, k, v, g, beta = (x.squeeze(1) for x in (query, key, value, g, beta))
        o = ops.gated_delta_rule_step(
            q, k, v, g, beta, initial_state, qk_l2norm=use_qk_l2norm_in_kernel, impl=unless_gluon(impl)
        )
        return o.unsqueeze(1), initial_state
    o, final = fitting.delta_rule(
        ops.recurrent_gated_delta_rule, query, key, value, g, beta, scale=None,
        initial_state=_wide(initial_state, query), qk_l2norm=use_qk_l2norm_in_kernel, impl=unless_gluon(impl),
    )  # fmt: skip
    return o, final if output_final_state else None


def mamba_chunk_scan(
    hidden_states: Float[Tensor, "B T HV P"],
    dt: Float[Tensor, "B T HV"],
    A: Float[Tensor, "HV"],
    B: Float[Tensor, "B T G N"],
    C: Float[Tensor, "B T G N"],
    chunk_size: int,
    D: Float[Tensor, "HV"] | None = None,
    dt_bias: Float[Tensor, "HV"] | None = None,
    initial_states: Float[Tensor, "B HV P N"] | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    z: Float[Tensor, "B T HV P"] | None = None,
    *,
    impl: Impl | None = None,
    **call: Any,
) -> Any:
    """Apply SSD to whole sequences; return the outputs and, with `return_final_states`, the final states.

    States are `[B, HV, P, N]`: transposed views of the operation's states, so that a decoding step can overwrite them.
    """
    shape = hidden_states.shape
    C, cu_seqlens = _packed(C, call)
    B, x, dt = (t.reshape(*C.shape[:2], *t.shape[2:]) for t in (B, hidden_states, dt))
    _refuse_cache(cu_seqlens, initial_states, return_final_states)
    dt = _time_step(dt, dt_bias, dt_softplus)
    if tuple(dt_limit) != (0.0, float("inf")):
        dt = dt.clamp(*dt_limit)
    before = _wide(initial_states, C)
    y, final = fitting.ssd(
        ops.chunk_ssd, C.to(x.dtype), B.to(x.dtype), x, dt * at_least_float32(A), dt=dt, D=D,
        initial_state=None if before is None else before.mT, cu_seqlens=cu_seqlens, impl=impl,
    )  # fmt: skip
    # make the outputs contiguous, because the calling layers apply .view to them
    y = y.reshape(shape).contiguous()
    y = y if z is None else y * F.silu(z)
    return (y, final.mT) if return_final_states else y


def selective_state_update(
    state: Float[Tensor, "B HV P N"],
    hidden_states: Float[Tensor, "B HV P"],
    dt: Float[Tensor, "B HV P"],
    A: Float[Tensor, "HV P N"],
    B: Float[Tensor, "B G N"],
    C: Float[Tensor, "B G N"],
    D: Float[Tensor, "HV P"] | None = None,
    dt_bias: Float[Tensor, "HV P"] | None = None,
    dt_softplus: bool = False,
    z: Float[Tensor, "B HV P"] | None = None,
    *,
    impl: Impl | None = None,
    **call: Any,
) -> Float[Tensor, "B HV P"]:
    """Apply SSD to one token and update `state`; within a head, dt, A, D and dt_bias must be constant."""
    for name, per_head, axes in (("dt", dt, 1), ("A", A, 2), ("D", D, 1), ("dt_bias", dt_bias, 1)):
        if per_head is not None and any(per_head.stride(-i) and per_head.shape[-i] > 1 for i in range(1, axes + 1)):
            raise ValueError(f"selective_state_update: {name} must be one value per head, expanded, as in Mamba-2")
    x, b, c = hidden_states, B.to(hidden_states.dtype), C.to(hidden_states.dtype)
    dt = _time_step(dt[..., 0], None if dt_bias is None else dt_bias[:, 0], dt_softplus)
    gates = {"dt": dt, "D": None if D is None else D[:, 0]}
    g, ours, impl = dt * at_least_float32(A[:, 0, 0]), state.mT, unless_gluon(impl)
    overwritable = ours.is_contiguous() and ours.dtype == torch.float32 and not torch.is_grad_enabled()
    if overwritable and fitting.fits(c, x, SSD_SIZES, impl):
        y = ops.ssd_step(c, b, x, g, ours, **gates, impl=impl)
    else:
        # the token becomes a sequence of length 1
        token, gates["dt"] = [t.unsqueeze(1) for t in (c, b, x, g)], dt.unsqueeze(1)
        out = fitting.ssd(ops.recurrent_ssd, *token, **gates, initial_state=_wide(ours, x), impl=impl)
        y = out.o.squeeze(1)
        state.copy_(out.final_state.mT)
    return y if z is None else y * F.silu(z)


def mamba_split_conv1d_scan_combined(*args: Any, **kwargs: Any) -> None:
    """Return None: a layer then calls convolution and scan separately."""


def gated_norm(
    self: nn.Module,
    hidden_states: Float[Tensor, "*rows V"],
    gate: Float[Tensor, "*rows V"],
    *,
    impl: Impl | None = None,
) -> Tensor:
    """Normalise, then gate by SiLU or (an option of Qwen4-Exp) by a sigmoid: the forward of Gated DeltaNet's norms."""
    module: Any = self
    eps, impl = module.variance_epsilon, unless_gluon(impl)
    if getattr(module, "activation", "silu") == "sigmoid":
        y = ops.rms_norm(hidden_states, module.weight, eps=eps, dtype=torch.float32, impl=impl).y
        return (y * gate.float().sigmoid()).to(hidden_states.dtype)
    return ops.gated_rms_norm(hidden_states, gate, module.weight, eps=eps, impl=impl)


def norm_of_gated(
    self: nn.Module,
    hidden_states: Float[Tensor, "*rows D"],
    gate: Float[Tensor, "*rows D"] | None = None,
    *,
    impl: Impl | None = None,
) -> Tensor:
    """Gate by SiLU, then normalise all channels, or groups of them: the forward of Mamba-2's norms.

    The result has the wider dtype of input and weight. Falcon-H1's norm may gate after normalising; its result has the
    input's dtype.
    """
    module: Any = self
    falcon = type(module).__name__ == "FalconH1RMSNormGated"
    groups = module.n_groups if falcon else 1
    return ops.gated_rms_norm(
        hidden_states, gate, module.weight, size=getattr(module, "group_size", len(module.weight) // groups),
        eps=module.variance_epsilon, gate="after" if falcon and module.norm_before_gate else "before",
        dtype=hidden_states.dtype if falcon else torch.promote_types(hidden_states.dtype, module.weight.dtype),
        impl=unless_gluon(impl),
    )  # fmt: skip


def _packed(
    x: Float[Tensor, "B T ..."], call: dict[str, Any], cu_seqlens: Tensor | None = None
) -> tuple[Tensor, Int[Tensor, "N_plus_1"] | None]:
    """If the call has packed documents, return x as one row `[1, B · T, ...]` and their boundaries; else x and None."""
    if cu_seqlens is None:
        cu_seqlens = call.get("cu_seq_lens_q")
    if cu_seqlens is not None:
        return x, cu_seqlens
    index = call.get("seq_idx")
    cu_seqlens = None if index is None else _cu_seqlens_of(index, *x.shape[:2])
    return (x, None) if cu_seqlens is None else (x.reshape(1, -1, *x.shape[2:]), cu_seqlens)


class _Last:
    """Converts `seq_idx` to boundaries and stores the last result: only a call's first layer waits for the device."""

    def __init__(self) -> None:
        self.index, self.version, self.cu_seqlens = None, -1, None

    def __call__(self, index: Int[Tensor, "B T"], batch: int, tokens: int) -> Int[Tensor, "N_plus_1"] | None:
        starts = starts_of(index, batch, tokens)
        if torch.compiler.is_compiling():
            return cu_seqlens_of(starts)
        if self.index is None or self.index() is not index or self.version != index._version:
            self.index, self.version, self.cu_seqlens = weakref.ref(index), index._version, cu_seqlens_of(starts)
        return self.cu_seqlens


_cu_seqlens_of = _Last()


def _refuse_cache(cu_seqlens: Tensor | None, state: Tensor | None, output_final_state: bool) -> None:
    if cu_seqlens is not None and (state is not None or output_final_state):
        raise ValueError("packed documents exclude a cache: pass use_cache=False")


def _wide(state: Tensor | None, x: Tensor) -> Tensor | None:
    return None if state is None else state.to(torch.promote_types(x.dtype, torch.float32))


def _time_step(dt: Tensor, bias: Tensor | None, softplus: bool) -> Tensor:
    dt = at_least_float32(dt)
    dt = dt if bias is None else dt + bias
    return F.softplus(dt) if softplus else dt


def _fused(activation: str | None) -> Any:
    return "silu" if activation in _SILU else None


def _activated(x: Tensor, activation: str | None) -> Tensor:
    """Apply an activation, unless the convolution operation has applied it (None, SiLU)."""
    if activation is None or activation in _SILU:
        return x
    from transformers.activations import ACT2FN

    return ACT2FN[activation](x)


# the functions of this module, by the names under which layers call them
FUNCTIONS = {
    "causal_conv1d_fn": causal_conv1d_fn,
    "causal_conv1d_update": causal_conv1d_update,
    "torch_chunk_gated_delta_rule": chunk_gated_delta_rule,
    "torch_recurrent_gated_delta_rule": recurrent_gated_delta_rule,
    "mamba2_chunk_scan": mamba_chunk_scan,
    "mamba2_selective_state_update": selective_state_update,
    "mamba2_split_conv1d_scan_combined": mamba_split_conv1d_scan_combined,
}
