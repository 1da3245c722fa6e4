"""Operations: one public function for each mathematical operation and form of execution."""

# what explain knows
import tokenmix_core.ops.operations  # noqa: F401
from tokenmix_core.ops.convolution.api import short_conv, short_conv_step, short_conv_steps, short_convs
from tokenmix_core.ops.delta_layer.api import delta_layer_step
from tokenmix_core.ops.explanation import Explanation, explain
from tokenmix_core.ops.gated_delta_rule.api import (
    chunk_gated_delta_rule,
    gated_delta_rule_step,
    recurrent_gated_delta_rule,
)
from tokenmix_core.ops.gated_units.api import swiglu, swiglu_linear
from tokenmix_core.ops.gates.api import delta_gates
from tokenmix_core.ops.norms.api import gated_rms_norm, rms_norm
from tokenmix_core.ops.projections.api import fused_linears
from tokenmix_core.ops.rotary.api import rotate, rotate_step
from tokenmix_core.ops.softmax_attention.api import attention, attention_decode, merge_attention
from tokenmix_core.ops.sparse_attention.api import kept_attention
from tokenmix_core.ops.ssd.api import chunk_ssd, recurrent_ssd, ssd_step

__all__ = [
    "Explanation",
    "attention",
    "attention_decode",
    "chunk_gated_delta_rule",
    "chunk_ssd",
    "delta_gates",
    "delta_layer_step",
    "explain",
    "fused_linears",
    "gated_delta_rule_step",
    "gated_rms_norm",
    "kept_attention",
    "merge_attention",
    "recurrent_gated_delta_rule",
    "recurrent_ssd",
    "rms_norm",
    "rotate",
    "rotate_step",
    "short_conv",
    "short_conv_step",
    "short_conv_steps",
    "short_convs",
    "ssd_step",
    "swiglu",
    "swiglu_linear",
]
