"""Operations: one public function for each mathematical operation and form of execution."""

# what explain knows
import tokenmix_core.ops.operations  # noqa: F401
from tokenmix_core.ops.attention.api import attention, attention_decode, merge_attention
from tokenmix_core.ops.delta_gates.api import delta_gates
from tokenmix_core.ops.explain import Explanation, explain
from tokenmix_core.ops.gated_delta_rule.api import (
    chunk_gated_delta_rule,
    gated_delta_rule_step,
    recurrent_gated_delta_rule,
)
from tokenmix_core.ops.rms_norm.api import gated_rms_norm, rms_norm
from tokenmix_core.ops.rotary.api import rotate
from tokenmix_core.ops.short_conv.api import short_conv, short_conv_step, short_conv_steps
from tokenmix_core.ops.sparse_attention.api import kept_attention
from tokenmix_core.ops.ssd.api import chunk_ssd, recurrent_ssd, ssd_step
from tokenmix_core.ops.swiglu.api import swiglu, swiglu_linear

__all__ = [
    "Explanation",
    "attention",
    "attention_decode",
    "chunk_gated_delta_rule",
    "chunk_ssd",
    "delta_gates",
    "explain",
    "gated_delta_rule_step",
    "gated_rms_norm",
    "kept_attention",
    "merge_attention",
    "recurrent_gated_delta_rule",
    "recurrent_ssd",
    "rms_norm",
    "rotate",
    "short_conv",
    "short_conv_step",
    "short_conv_steps",
    "ssd_step",
    "swiglu",
    "swiglu_linear",
]
