"""Configuration fields and decoder layers of transformers' models with Native Hybrid Attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeDecoderLayer

from tokenmix_core.modeling import HybridCache, LayerState, PacksRows, check_depth, takes_either_name
from tokenmix_core.nn import RMSNorm, Rotation, SwiGLU, add_and_norm, is_plain
from tokenmix_nha.mixer import NhaMixer
from tokenmix_nha.windows import check_windows


@dataclass(kw_only=True)
class HybridizedConfig:
    """The fields that the configuration of a model with Native Hybrid Attention adds to transformers' own.

    Attributes:
        window: a number of tokens (0 for none), or "full"; or a list of windows, which repeats over the layers. It is
            stored as a list with one window per layer.
        slots: M, number of slots of every key head; 0 for none.
        gate_normalizer: τ, by which the log-gates are divided.
        nha_impl: implementation of the operations, None, "gluon", "triton" or "reference".

    Raises:
        ValueError: invalid windows; or the model's attention has sliding windows or dropout.
    """

    window: Any = 32
    slots: int = 64
    gate_normalizer: float = 8.0
    nha_impl: str | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        check_depth(self.num_hidden_layers)  # type: ignore[attr-defined]
        super().__post_init__(**kwargs)  # type: ignore[misc]
        self.window = check_windows(self.window, self.num_hidden_layers, self.slots)  # type: ignore[attr-defined]
        sliding = "sliding_attention" in (getattr(self, "layer_types", None) or [])
        if sliding or getattr(self, "sliding_window", None) is not None:
            raise ValueError(
                f"{type(self).__name__}: the model's own sliding windows have no counterpart; use_sliding_window and "
                "layer_types must say that its attention is full"
            )
        if getattr(self, "attention_dropout", 0):
            raise ValueError(
                f"{type(self).__name__}: no attention weights are formed that could be dropped; attention_dropout must "
                f"be 0, got {self.attention_dropout!r}"  # type: ignore[attr-defined]
            )


class HybridizedAttention(NhaMixer):
    """An `NhaMixer` with the signature by which transformers' decoder layers call attention."""

    def __init__(self, config: Any, layer_idx: int, attention: Any):
        biases = {name: getattr(attention, name).bias is not None for name in ("q_proj", "o_proj")}
        super().__init__(
            config.hidden_size,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=attention.head_dim,
            slots=config.slots,
            window=config.window[layer_idx],
            gate_normalizer=config.gate_normalizer,
            qk_norm=hasattr(attention, "q_norm"),
            qkv_bias=biases["q_proj"],
            o_bias=biases["o_proj"],
            norm_eps=config.rms_norm_eps,
            impl=config.nha_impl,
        )
        self.layer_idx = layer_idx

    @takes_either_name
    def forward(
        self,
        hidden_states: Tensor,
        *,
        rotary: Rotation,
        cache: HybridCache | None = None,
        cu_seqlens: Tensor | None = None,
        **given: Any,
    ) -> tuple[Tensor, None]:
        if not hidden_states.shape[1]:
            # a chunk of a prompt in a padded batch may contain only padding, that is, no token
            return hidden_states, None
        state: LayerState | None = None
        if cache is not None:
            state = cache.acquire(self.layer_idx, hidden_states.device)
        o = super().forward(hidden_states, state=state, cu_seqlens=cu_seqlens, rotary=rotary)[0]
        if cache is not None:
            cache.release(self.layer_idx)
        return o, None


class AddsBeforeNorm:
    """Base class to list before transformers' decoder layer: fuses the residual additions with other operations.

    The kernel of the norm after attention adds attention's output to the residual stream. The MLP gets the stream as an
    argument and adds its own output to it.
    """

    input_layernorm: RMSNorm
    self_attn: HybridizedAttention
    post_attention_layernorm: RMSNorm
    mlp: SwiGLU

    @takes_either_name
    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: HybridCache | None = None,
        **given: Any,
    ) -> Tensor:
        given |= {"attention_mask": attention_mask, "position_ids": position_ids, "cache": cache}
        mixed, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **given)
        y, hidden_states = add_and_norm(self.post_attention_layernorm, hidden_states, mixed)
        # if the MLP has hooks, they must see the MLP's own output, without the residual added
        return self.mlp(y, hidden_states) if is_plain(SwiGLU, self.mlp) else hidden_states + self.mlp(y)


def _derived(prefix: str, layer: type, *before: type) -> type:
    # pickle finds a class by its qualified name, and FSDP wraps layers by the names of their classes
    names = {"__module__": __name__, "__qualname__": f"{prefix}{layer.__name__}"}
    return type(layer.__name__, (PacksRows, *before, layer), names)


_DENSE = (LlamaDecoderLayer, Qwen2DecoderLayer, Qwen3DecoderLayer)
_ADDING = {x: _derived("Adding", x, AddsBeforeNorm) for x in _DENSE}
_PACKING = {x: _derived("Packing", x) for x in (*_DENSE, Qwen3MoeDecoderLayer)}
globals().update({x.__qualname__: x for x in (*_ADDING.values(), *_PACKING.values())})


def take_core_layers(model: Any) -> None:
    """Replace the norms and SwiGLUs of the layers by core's modules, whose parameters have the same names."""
    config = model.config
    for layer in model.layers:
        for name in ("input_layernorm", "post_attention_layernorm"):
            setattr(layer, name, RMSNorm(config.hidden_size, config.rms_norm_eps))
        names, classes = [name for name, _ in layer.mlp.named_parameters()], _PACKING
        if config.hidden_act == "silu" and names == [f"{x}_proj.weight" for x in ("gate", "up", "down")]:
            layer.mlp = SwiGLU(*layer.mlp.down_proj.weight.shape)
            classes = _PACKING | _ADDING
        layer.__class__ = classes[type(layer)]
    model.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
