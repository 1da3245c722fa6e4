"""Modules with parameters, without transformers: norms, rotary positions, MLP, loss and the baseline mixers."""

from typing import TYPE_CHECKING

from tokenmix_core._utils.lazy_imports import lazily

if TYPE_CHECKING:
    from tokenmix_core.nn.attention import Attention as Attention
    from tokenmix_core.nn.attention import cached_attention as cached_attention
    from tokenmix_core.nn.attention import cached_attention_lse as cached_attention_lse
    from tokenmix_core.nn.attention import mean_visible as mean_visible
    from tokenmix_core.nn.dtypes import KeepsFloat32 as KeepsFloat32
    from tokenmix_core.nn.dtypes import at_least_float32 as at_least_float32
    from tokenmix_core.nn.head_padding import HeadFit as HeadFit
    from tokenmix_core.nn.head_padding import attention_heads as attention_heads
    from tokenmix_core.nn.head_weights import HeadWeights as HeadWeights
    from tokenmix_core.nn.init import init_decay_ as init_decay_
    from tokenmix_core.nn.init import init_time_step_ as init_time_step_
    from tokenmix_core.nn.init import is_loaded as is_loaded
    from tokenmix_core.nn.loss import IGNORE as IGNORE
    from tokenmix_core.nn.loss import at_least_one as at_least_one
    from tokenmix_core.nn.mixer import Mixer as Mixer
    from tokenmix_core.nn.mixer import MixerOutput as MixerOutput
    from tokenmix_core.nn.mixer import stepping as stepping
    from tokenmix_core.nn.mlp import SwiGLU as SwiGLU
    from tokenmix_core.nn.mlp import swiglu_width as swiglu_width
    from tokenmix_core.nn.norm import GatedRMSNorm as GatedRMSNorm
    from tokenmix_core.nn.norm import RMSNorm as RMSNorm
    from tokenmix_core.nn.norm import add_and_norm as add_and_norm
    from tokenmix_core.nn.permute import moved as moved
    from tokenmix_core.nn.plain import is_plain as is_plain
    from tokenmix_core.nn.plain import warn_slower as warn_slower
    from tokenmix_core.nn.projections import is_plain_linear as is_plain_linear
    from tokenmix_core.nn.projections import output_linear as output_linear
    from tokenmix_core.nn.projections import projected as projected
    from tokenmix_core.nn.rotary import Rotation as Rotation
    from tokenmix_core.nn.rotary import apply_rotary as apply_rotary
    from tokenmix_core.nn.rotary import apply_rotary_to_both as apply_rotary_to_both
    from tokenmix_core.nn.rotary import normed_for_step as normed_for_step
    from tokenmix_core.nn.short_conv import ShortConv as ShortConv
    from tokenmix_core.nn.short_conv import convolved as convolved
    from tokenmix_core.nn.state import Bounds as Bounds
    from tokenmix_core.nn.state import KVState as KVState
    from tokenmix_core.nn.state import LayerState as LayerState
    from tokenmix_core.nn.state import PagedKVState as PagedKVState
    from tokenmix_core.nn.state import Pages as Pages
    from tokenmix_core.nn.state import RaggedKVState as RaggedKVState
    from tokenmix_core.nn.state import Span as Span
    from tokenmix_core.nn.state import StatePart as StatePart
    from tokenmix_core.nn.state import TensorState as TensorState
    from tokenmix_core.nn.state import copy_all as copy_all
    from tokenmix_core.nn.state import first_taken as first_taken

__getattr__ = lazily(__name__)
