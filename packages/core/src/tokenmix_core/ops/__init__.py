"""Operations: one public function per mathematical operation and form of call, such as whole sequences or one token."""

from typing import TYPE_CHECKING

# imported for its side effect: it registers the operations that `explain` describes
import tokenmix_core.ops.registry  # noqa: F401
from tokenmix_core._utils.lazy_imports import lazily
from tokenmix_core.ops.causal_conv1d.api import (
    short_conv,
    short_conv_prefill,
    short_conv_step,
    short_conv_steps,
    short_convs,
    short_convs_prefill,
)
from tokenmix_core.ops.explanation import Explanation, explain
from tokenmix_core.ops.fused.gdn_decode import delta_layer_step
from tokenmix_core.ops.fused.gdn_gates import delta_gates
from tokenmix_core.ops.fused.gemv import fused_linears
from tokenmix_core.ops.fused.rms_norm import gated_rms_norm, rms_norm
from tokenmix_core.ops.fused.rotary import rotate, rotate_step
from tokenmix_core.ops.fused.swiglu import swiglu, swiglu_linear
from tokenmix_core.ops.gated_delta_rule.api import (
    chunk_gated_delta_rule,
    gated_delta_rule_prefill,
    gated_delta_rule_step,
    recurrent_gated_delta_rule,
)
from tokenmix_core.ops.softmax_attention.api import (
    attention,
    attention_decode,
    merge_attention,
    paged_attention_decode,
)
from tokenmix_core.ops.sparse_attention.api import kept_attention
from tokenmix_core.ops.ssd.api import chunk_ssd, recurrent_ssd, ssd_prefill, ssd_step

__all__ = [
    "DELTA_RULE_HEAD_SIZES",
    "SSD_HEAD_SIZES",
    "Explanation",
    "attention",
    "attention_autograd",
    "attention_decode",
    "chunk_gated_delta_rule",
    "chunk_ssd",
    "delta_gates",
    "delta_layer_step",
    "delta_rule_autograd",
    "explain",
    "fused_linears",
    "gated_delta_rule_prefill",
    "gated_delta_rule_step",
    "gated_rms_norm",
    "kept_attention",
    "merge_attention",
    "paged_attention_decode",
    "recurrent_gated_delta_rule",
    "recurrent_ssd",
    "rms_norm",
    "rotate",
    "rotate_step",
    "short_conv",
    "short_conv_prefill",
    "short_conv_step",
    "short_conv_steps",
    "short_convs",
    "short_convs_prefill",
    "ssd_autograd",
    "ssd_prefill",
    "ssd_step",
    "swiglu",
    "swiglu_linear",
]

if TYPE_CHECKING:
    from tokenmix_core.ops.autograd import cached_op as cached_op
    from tokenmix_core.ops.autograd import differentiable as differentiable
    from tokenmix_core.ops.autograd import direct_when_eager as direct_when_eager
    from tokenmix_core.ops.autograd import eager_function as eager_function
    from tokenmix_core.ops.autograd import of_fields as of_fields
    from tokenmix_core.ops.autograd import retried as retried
    from tokenmix_core.ops.buffers import aligned as aligned
    from tokenmix_core.ops.buffers import buffer_bytes as buffer_bytes
    from tokenmix_core.ops.buffers import buffer_views as buffer_views
    from tokenmix_core.ops.buffers import rows_of as rows_of
    from tokenmix_core.ops.buffers import token_rows as token_rows
    from tokenmix_core.ops.causal_conv1d.backward import short_conv_sums_kernel as short_conv_sums_kernel
    from tokenmix_core.ops.causal_conv1d.forward import load_input as load_input
    from tokenmix_core.ops.causal_conv1d.forward import within as within
    from tokenmix_core.ops.causal_conv1d.tuning import conv1d_backward_tile as conv1d_backward_tile
    from tokenmix_core.ops.checks import bind_shapes as bind_shapes
    from tokenmix_core.ops.checks import check_cu_seqlens as check_cu_seqlens
    from tokenmix_core.ops.checks import check_dtype as check_dtype
    from tokenmix_core.ops.checks import check_multiple as check_multiple
    from tokenmix_core.ops.checks import check_same_device as check_same_device
    from tokenmix_core.ops.checks import check_same_dtype as check_same_dtype
    from tokenmix_core.ops.checks import check_scale as check_scale
    from tokenmix_core.ops.checks import check_tensors as check_tensors
    from tokenmix_core.ops.dispatch import GluonForm as GluonForm
    from tokenmix_core.ops.dispatch import by_reference as by_reference
    from tokenmix_core.ops.dispatch import resolve_impl as resolve_impl
    from tokenmix_core.ops.dispatch import row_impl as row_impl
    from tokenmix_core.ops.dispatch import unless_gluon as unless_gluon
    from tokenmix_core.ops.explanation import WHOLE as WHOLE
    from tokenmix_core.ops.explanation import Tensors as Tensors
    from tokenmix_core.ops.explanation import register_operation as register_operation
    from tokenmix_core.ops.exporting import exportable as exportable
    from tokenmix_core.ops.exporting import is_exporting as is_exporting
    from tokenmix_core.ops.fused.swiglu_kernels import BD as BD
    from tokenmix_core.ops.fused.swiglu_kernels import BM as BM
    from tokenmix_core.ops.fused.swiglu_kernels import tile_of as tile_of
    from tokenmix_core.ops.gated_delta_rule import autograd as delta_rule_autograd
    from tokenmix_core.ops.gated_delta_rule.api import HEAD_SIZES as DELTA_RULE_HEAD_SIZES
    from tokenmix_core.ops.gated_delta_rule.reference import l2_normalise as l2_normalise
    from tokenmix_core.ops.padding import drops_padding as drops_padding
    from tokenmix_core.ops.padding import without_padding as without_padding
    from tokenmix_core.ops.padding import zero_padding as zero_padding
    from tokenmix_core.ops.registry import attention_steps as attention_steps
    from tokenmix_core.ops.registry import delta_rule_steps as delta_rule_steps
    from tokenmix_core.ops.registry import ssd_steps as ssd_steps
    from tokenmix_core.ops.slots import at_slots as at_slots
    from tokenmix_core.ops.slots import check_written as check_written
    from tokenmix_core.ops.slots import refuse_gradients as refuse_gradients
    from tokenmix_core.ops.softmax_attention import autograd as attention_autograd
    from tokenmix_core.ops.softmax_attention.backends import by_cudnn as by_cudnn
    from tokenmix_core.ops.softmax_attention.backends import choose_impl as choose_impl
    from tokenmix_core.ops.softmax_attention.backward import attention_backward as attention_backward
    from tokenmix_core.ops.softmax_attention.cudnn_plans import kernels_before_plan as kernels_before_plan
    from tokenmix_core.ops.softmax_attention.forward import attention_forward as attention_forward
    from tokenmix_core.ops.softmax_attention.kv_tiles import add_dot as add_dot
    from tokenmix_core.ops.softmax_attention.kv_tiles import load_tile as load_tile
    from tokenmix_core.ops.softmax_attention.kv_tiles import store_tile as store_tile
    from tokenmix_core.ops.softmax_attention.launch_args import block_size as block_size
    from tokenmix_core.ops.softmax_attention.launch_args import dense_rows as dense_rows
    from tokenmix_core.ops.softmax_attention.launch_args import precision as precision
    from tokenmix_core.ops.softmax_attention.launch_args import strides as strides
    from tokenmix_core.ops.softmax_attention.plan import GLUON as GLUON
    from tokenmix_core.ops.softmax_attention.plan import limit as limit
    from tokenmix_core.ops.softmax_attention.reference import attended as attended
    from tokenmix_core.ops.softmax_attention.reference import joined as joined
    from tokenmix_core.ops.softmax_attention.reference import wide as wide
    from tokenmix_core.ops.softmax_attention.types import Call as Call
    from tokenmix_core.ops.softmax_attention.types import Mask as Mask
    from tokenmix_core.ops.ssd import autograd as ssd_autograd
    from tokenmix_core.ops.ssd.api import HEAD_SIZES as SSD_HEAD_SIZES
    from tokenmix_core.ops.transforms import refuse_writes as refuse_writes
    from tokenmix_core.ops.types import AttentionOutput as AttentionOutput
    from tokenmix_core.ops.types import Impl as Impl
    from tokenmix_core.ops.types import ScanOutput as ScanOutput

__getattr__ = lazily(__name__)
