"""Our causal language model in the form of a vLLM model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config.compilation import CUDAGraphMode  # pyright: ignore[reportMissingImports]
from vllm.model_executor.layers.mamba.mamba_utils import (  # pyright: ignore[reportMissingImports]
    get_temporal_copy_spec,
)
from vllm.model_executor.models.interfaces import HasInnerState, IsHybrid  # pyright: ignore[reportMissingImports]

from tokenmix_core.chunking import cdiv
from tokenmix_core.integrations.vllm.layers import ServedAttention, ServedState, StateSlots
from tokenmix_core.integrations.vllm.states import SLOT_DTYPE, SlotLayout, causal_lm_of, slot_elements, slot_layouts
from tokenmix_core.nn import Attention
from tokenmix_core.nn.norm import add_and_norm
from tokenmix_core.nn.projections import join_weights, output_linear
from tokenmix_core.nn.registry import find_mixer


class ServedCausalLM(nn.Module, HasInnerState, IsHybrid):
    """A model of this library, built from its folder's configuration, whose layers keep their states in vLLM's memory.

    Raises:
        ValueError: tensor or pipeline parallelism, quantisation or speculative decoding is requested.
    """

    def __init__(self, *, vllm_config: Any, prefix: str = ""):
        super().__init__()
        _check(vllm_config)
        compilation = vllm_config.compilation_config
        if compilation.cudagraph_mode == CUDAGraphMode.FULL_AND_PIECEWISE:
            # full graphs of decoding only: vLLM compiles no part of this model, and would capture nothing between
            # attention layers
            compilation.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY
        config = vllm_config.model_config.hf_config
        model = causal_lm_of(config)(config).eval()
        model.tie_weights()
        self.config, self.lm_head, self.backbone = config, model.lm_head, model.model
        for block in self.backbone.layers:
            mixer, mlp = block.mixer, block.mlp
            names = vars(type(mixer)).get("joint_layers", ())
            join_weights([layer for name in names if (layer := getattr(mixer, name)) is not None])
            if mlp is not None:
                join_weights([mlp.gate_proj, mlp.up_proj])
        # maps the name of each weight in a checkpoint to the tensor to load it into
        self._targets = {**dict(model.named_parameters()), **_persistent_buffers(model)}
        self._tied = model.lm_head.weight is model.model.embed_tokens.weight
        layouts = _layouts(vllm_config)
        elements, length = slot_elements(layouts), vllm_config.model_config.max_model_len
        shared, served = _layers_per_slot(vllm_config, layouts), 0
        for i, block in enumerate(self.backbone.layers):
            name, label = f"model.layers.{i}.mixer", config.labels[i]
            if label not in layouts:
                block.mixer = ServedAttention(block.mixer, vllm_config, name)
                continue
            if served % shared == 0:
                slots = StateSlots(elements, shared, vllm_config, name)
            prepare = self.backbone.prepare_mixer_inputs
            block.mixer = ServedState(block.mixer, layouts[label], slots, served % shared, prepare, length)
            served += 1

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """Return the embeddings `[T, D]` of the tokens."""
        return self.backbone.embed_tokens(input_ids)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Return the last hidden states `[T, D]` for the tokens of a step."""
        x = self.embed_input_ids(input_ids) if inputs_embeds is None and input_ids is not None else inputs_embeds
        assert x is not None
        hidden, branch = x.unsqueeze(0), None
        rotary = {int(dim): table(positions.unsqueeze(0)) for dim, table in self.backbone.rotary.items()}
        for block in self.backbone.layers:
            rotation = rotary.get(block.mixer.rotary_dim or 0)
            hidden, branch, _ = block(hidden, branch, defer=True, rotary=rotation)
        return add_and_norm(self.backbone.norm, hidden, branch)[0].squeeze(0)

    def compute_logits(self, hidden_states: Tensor, *_: Any) -> Tensor:
        """Return the logits `[n, vocab]` for last hidden states `[n, D]`."""
        return output_linear(hidden_states, self.lm_head)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy the tensors of a checkpoint, named as in the model that wrote it, into this model.

        Raises:
            ValueError: missing or unknown tensors, or tensors of other shapes.
        """
        missing = set(self._targets)
        for name, value in weights:
            if self._tied and name == "lm_head.weight":
                continue
            target = self._targets.get(name)
            if target is None or target.shape != value.shape:
                known = "unknown" if target is None else f"of shape {list(target.shape)}, not {list(value.shape)}"
                raise ValueError(f"the checkpoint's tensor {name} is {known} in a {type(self.config).__name__} model")
            target.data.copy_(value)
            missing.discard(name)
        if missing:
            raise ValueError(f"the checkpoint lacks {', '.join(sorted(missing)[:5])}")

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: Any) -> tuple[tuple[int, ...], ...]:
        layouts = _layouts(vllm_config)
        return ((slot_elements(layouts) * _layers_per_slot(vllm_config, layouts),),)

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: Any) -> tuple[torch.dtype, ...]:
        return (SLOT_DTYPE,)

    @classmethod
    def get_mamba_state_copy_func(cls) -> tuple[Any, ...]:
        return (get_temporal_copy_spec,)


# most tokens in a block of keys, which is as large as a slot, for which layers share slots
_MOST_TOKENS = 512
_STATE_DTYPES = ("float32", "bfloat16", "float16")
_known: dict[str, dict[str, SlotLayout]] = {}


def _layouts(vllm_config: Any) -> dict[str, SlotLayout]:
    """Return, by label, the slot layouts of the layers that are not served by vLLM's attention."""
    config, model = vllm_config.model_config.hf_config, vllm_config.model_config
    given = getattr(vllm_config, "additional_config", None)
    name = given.get("state_dtype", "float32") if isinstance(given, dict) else "float32"
    if name not in _STATE_DTYPES:
        raise ValueError(f"state_dtype in additional_config must be {', '.join(_STATE_DTYPES)}, got {name!r}")
    key = f"{config.to_json_string()} {model.max_model_len} {model.dtype} {name}"
    if key not in _known:
        labels = [label for label in dict.fromkeys(config.labels) if not _is_paged(config, label)]
        _known[key] = slot_layouts(config, labels, model.max_model_len, model.dtype, getattr(torch, name))
    return _known[key]


def _layers_per_slot(vllm_config: Any, layouts: dict[str, SlotLayout]) -> int:
    """Return how many layers have their states in one slot.

    vLLM forms groups of equally many layers of one kind, with a block table for each group, whose work takes CPU time
    in every step. With enough layers in a slot, there are as few groups as kinds of layers. A block of keys has the
    size of a slot, so layers of large states share none, and none do with prefix caching, which reuses whole blocks.
    """
    config, model, cache = vllm_config.model_config.hf_config, vllm_config.model_config, vllm_config.cache_config
    indices = range(config.num_hidden_layers)
    paged = Counter(config.options_of(i).get("window") for i in indices if config.labels[i] not in layouts)
    if not paged or not layouts or cache.enable_prefix_caching:
        return 1
    shared = cdiv(config.num_hidden_layers - paged.total(), min(paged.values()))
    token = 2 * model.get_num_kv_heads(vllm_config.parallel_config) * model.get_head_size() * model.dtype.itemsize
    slot = slot_elements(layouts) * SLOT_DTYPE.itemsize
    return max(1, min(shared, _MOST_TOKENS * token // slot))


def _is_paged(config: Any, label: str) -> bool:
    i = config.labels.index(label)
    return find_mixer(config.mixer_type(i)) is Attention and not config.options_of(i).get("sinks")


def _persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    saved = model.state_dict()
    return {name: buffer for name, buffer in model.named_buffers() if name in saved}


def _check(vllm_config: Any) -> None:
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    for name in ("tensor_parallel_size", "pipeline_parallel_size"):
        if getattr(parallel, name) != 1:
            raise ValueError(f"{name} must be 1: tokenmix models are served by one GPU each, and data_parallel_size")
    if model.quantization is not None:
        raise ValueError(f"quantization={model.quantization!r} is not available for tokenmix models")
    if vllm_config.speculative_config is not None:
        raise ValueError(
            "speculative decoding by vLLM is not available for tokenmix models: states cannot be rolled back"
        )
