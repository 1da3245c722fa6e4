"""Register the operations of tokenmix_core, so that `explain` can describe them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from tokenmix_core.ops.causal_conv1d.api import short_conv, short_conv_step
from tokenmix_core.ops.decode_tiles import StateStep, gluon_step_tile, step_limit
from tokenmix_core.ops.dispatch import GluonForm, resolve_impl
from tokenmix_core.ops.explanation import WHOLE, Tensors, register_operation
from tokenmix_core.ops.fused.gdn_decode import delta_layer_step
from tokenmix_core.ops.fused.gemv import DTYPES, fused_linears
from tokenmix_core.ops.gated_delta_rule import plan as delta_rule_plan
from tokenmix_core.ops.gated_delta_rule import tuning as delta_rule_tuning
from tokenmix_core.ops.gated_delta_rule.api import (
    chunk_gated_delta_rule,
    gated_delta_rule_step,
    recurrent_gated_delta_rule,
)
from tokenmix_core.ops.gated_delta_rule.constants import split_values
from tokenmix_core.ops.softmax_attention import plan as attention_plan
from tokenmix_core.ops.softmax_attention.api import attention, attention_decode, paged_attention_decode
from tokenmix_core.ops.softmax_attention.api import implementation as implementation_of_attention
from tokenmix_core.ops.softmax_attention.backends import backward_impl
from tokenmix_core.ops.softmax_attention.types import Mask, call_of
from tokenmix_core.ops.sparse_attention import plan as kept_plan
from tokenmix_core.ops.sparse_attention.api import kept_attention
from tokenmix_core.ops.ssd import plan as ssd_plan
from tokenmix_core.ops.ssd import tuning as ssd_tuning
from tokenmix_core.ops.ssd.api import chunk_ssd, recurrent_ssd, ssd_step


def delta_rule_steps(k: Tensor, v: Tensor, impl: str | None) -> Mapping[str, str]:
    """Name the kernels of each step of the chunkwise gated delta rule."""
    v = split_values(v, delta_rule_plan.head_parts(k, v, impl))
    plan = delta_rule_plan.plan(k, v, None, True, impl)
    steps = {"chunks' terms": plan.prepare, "outputs": plan.outputs, "states for the gradients": plan.states}
    if plan.fused_backward:
        return steps | {"gradients": "gluon, in one step"}
    return steps | {"gradients of states": plan.backward_state, "other gradients": plan.backward_chunk}


def ssd_steps(q: Tensor, v: Tensor, impl: str | None) -> Mapping[str, str]:
    """Name the kernels of each step of chunkwise SSD."""
    plan = ssd_plan.plan(q, v, None, impl)
    gradients = "triton" if plan.gradients.hopper is None else "gluon"
    return {
        "states of segments and boundaries": "triton",
        "outputs": "gluon" if plan.forward.hopper else "triton",
        "gradients": f"{gradients}, in a reverse scan" if plan.gradients.scans else gradients,
    }


def attention_steps(q: Tensor, k: Tensor, v: Tensor, impl: str | None) -> Mapping[str, str]:
    """Name our kernels of each step of causal attention; for calls that no other library computes."""
    plan = attention_plan.plan(q, k, v, Mask(True, None, 0), impl, v)
    steps = "outputs", "gradients of queries", "gradients of keys and values"
    return {
        name: "gluon" if isinstance(made, attention_plan.Form) else "triton"
        for name, made in zip(steps, plan, strict=True)
    }


def _state_step(gluon: GluonForm, tiles: Mapping[int, StateStep]) -> Callable[[Tensors, str | None], Mapping[str, str]]:
    """Return a function that names the kernel of a recurrence's decoding step; see `Operation.kernels`."""

    def steps(tensors: Tensors, impl: str | None) -> Mapping[str, str]:
        tile = gluon_step_tile(tiles, gluon, tensors["state"], tensors["q"], impl)
        return {WHOLE: "triton" if tile is None else "gluon"}

    return steps


def _attention(tensors: Tensors, impl: str | None) -> Mapping[str, str]:
    q, k, v = (tensors[name] for name in "qkv")
    mask = Mask(True, None, 0)
    chosen = implementation_of_attention("attention", q, k, v, mask, False, impl)
    if chosen not in (None, "gluon", "triton"):
        return {WHOLE: chosen}
    outputs, *gradients = attention_steps(q, k, v, chosen).items()
    whose = backward_impl(chosen, call_of(q, k, v, mask, False), False)
    return dict([outputs, *(gradients if whose == chosen else [("gradients", str(whose))])])


def _kept_attention(tensors: Tensors, impl: str | None) -> Mapping[str, str]:
    gluon = impl == "gluon" or kept_plan.takes_gluon(impl, *(tensors[name] for name in "qkv"), None)
    return {WHOLE: "gluon" if gluon else "triton"}


def _linears(tensors: Tensors, impl: str | None) -> Mapping[str, str]:
    impl = impl or (None if tensors["x"].dtype in DTYPES else "reference")
    return {WHOLE: resolve_impl("fused_linears", impl, tensors["x"]) or "triton"}


def _step_limit(tensors: Tensors) -> str | None:
    return step_limit(*tensors["state"].shape[2:])


_CHUNKS = {"B": 8, "T": 4096, "H": 16, "HV": 16, "K": 128, "V": 128}
_GROUPS = {"B": 8, "T": 4096, "G": 16, "HV": 16, "K": 128, "V": 128}
_KEYS = {"q": "B T H K", "k": "B T H K", "v": "B T HV V"}
_GROUPED = {"q": "B T G K", "k": "B T G K", "v": "B T HV V"}
_ONE = {"B": 8, "HV": 16, "K": 128, "V": 128}
_STATE = "B HV K V"
_ATTENTION = {"q": "B T HQ K", "k": "B T H K", "v": "B T H V"}

register_operation(
    chunk_gated_delta_rule, _KEYS, _CHUNKS, kernels=lambda x, impl: delta_rule_steps(x["k"], x["v"], impl),
    gluon=delta_rule_plan.GLUON,
)  # fmt: skip
register_operation(recurrent_gated_delta_rule, _KEYS, _CHUNKS)
register_operation(
    gated_delta_rule_step,
    {"q": "B H K", "k": "B H K", "v": "B HV V", "g": "B HV", "beta": "B HV", "state": _STATE},
    {"H": 16, **_ONE}, kernels=_state_step(delta_rule_plan.GLUON_STEP, delta_rule_tuning.STATE_STEPS),
    gluon=delta_rule_plan.GLUON_STEP, limit=_step_limit,
)  # fmt: skip
register_operation(delta_layer_step, {"q": "B H K", "k": "B H K", "v": "B HV V"}, {"H": 16, **_ONE})
register_operation(
    chunk_ssd, _GROUPED, _GROUPS, kernels=lambda x, impl: ssd_steps(x["q"], x["v"], impl), gluon=ssd_plan.GLUON,
    limit=lambda x: ssd_plan.limit(x["q"].shape[3], x["v"].shape[3]),
)  # fmt: skip
register_operation(recurrent_ssd, _GROUPED, _GROUPS)
register_operation(
    ssd_step, {"q": "B G K", "k": "B G K", "v": "B HV V", "g": "B HV", "state": _STATE}, {"G": 16, **_ONE},
    kernels=_state_step(ssd_plan.GLUON_STEP, ssd_tuning.STATE_STEPS), gluon=ssd_plan.GLUON_STEP, limit=_step_limit,
)  # fmt: skip
register_operation(
    attention, _ATTENTION, {"B": 8, "T": 4096, "HQ": 16, "H": 16, "K": 128, "V": 128}, kernels=_attention,
    gluon=attention_plan.GLUON, limit=lambda x: attention_plan.limit(x["q"], x["k"], x["v"]), selects=True,
)  # fmt: skip
register_operation(
    kept_attention, _ATTENTION, {"B": 8, "T": 4096, "HQ": 32, "H": 8, "K": 64, "V": 64}, kernels=_kept_attention,
    gluon=kept_plan.GLUON, limit=lambda x: kept_plan.limit(x["q"], x["k"], x["v"], None),
)  # fmt: skip
register_operation(
    attention_decode, {"q": "B TQ HQ K", "k_cache": "B S H K", "v_cache": "B S H V"},
    {"B": 8, "TQ": 1, "S": 4096, "HQ": 16, "H": 16, "K": 128, "V": 128},
)  # fmt: skip
register_operation(
    paged_attention_decode, {"q": "B TQ HQ K", "k_pages": "B P page K", "v_pages": "B P page V"},
    {"B": 8, "TQ": 1, "P": 1024, "page": 64, "HQ": 16, "K": 128, "V": 128},
)  # fmt: skip
register_operation(short_conv, {"x": "B T D", "weight": "D W"}, {"B": 8, "T": 4096, "D": 2048, "W": 4})
register_operation(short_conv_step, {"x": "B D", "weight": "D W"}, {"B": 8, "D": 2048, "W": 4})
register_operation(fused_linears, {"x": "B D"}, {"B": 8, "D": 2048}, kernels=_linears, selects=True)
