"""Metadata of a vLLM step for layers with a state: for each request its slot and its count of new and old tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backend import (  # pyright: ignore[reportMissingImports]
    AttentionBackend,
    AttentionCGSupport,
    AttentionMetadataBuilder,
)
from vllm.v1.attention.backends.utils import (  # pyright: ignore[reportMissingImports]
    mamba_get_block_table_tensor,
    split_decodes_and_prefills,
)

from tokenmix_core.integrations.vllm.request_inputs import request_inputs


@dataclass
class StateMetadata:
    """The requests of a step; those that are decoding (one new token) come first.

    Attributes:
        decodes: number of decoding requests.
        slots: slot of each request; 0, which belongs to no request, for padding of the batch of a CUDA graph.
        decode_slots: int32, the slot of each request; -1 for padding.
        before: number of tokens of each request before the step.
        decode_lengths: `before` of the decoding requests, on the host.
        prefill_lengths: `before` of all other requests, on the host.
        prefill_tokens: number of new tokens of each of the other requests, on the host.
        cu_seqlens: boundaries of the new tokens of the other requests; None if there are none.
        fresh: bool, True for each of the other requests without earlier tokens; None if all have earlier tokens.
        decode_inputs: the mixers' inputs of the decoding requests; empty for the model's defaults.
        prefill_inputs: the mixers' inputs of each of the other requests; empty for the model's defaults.
    """

    decodes: int
    slots: Tensor
    decode_slots: Tensor
    before: Tensor
    decode_lengths: list[int]
    prefill_lengths: list[int]
    prefill_tokens: list[int]
    cu_seqlens: Tensor | None
    fresh: Tensor | None
    decode_inputs: dict[str, Any] = field(default_factory=dict)
    prefill_inputs: list[dict[str, Any]] = field(default_factory=list)


class StateBackend(AttentionBackend):
    """vLLM's attention backend for our layers with a state: its name, and the class that builds its metadata."""

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_builder_cls() -> type[StateMetadataBuilder]:
        return StateMetadataBuilder

    @classmethod
    def is_ssm(cls) -> bool:
        return True


class StateMetadataBuilder(AttentionMetadataBuilder):
    """Builds the metadata for all layers with a state, in tensors at fixed addresses, which CUDA graphs need."""

    reorder_batch_threshold = 1

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        most = vllm_config.scheduler_config.max_num_seqs
        graphs = getattr(vllm_config.compilation_config, "max_cudagraph_capture_size", None) or 0
        self.slots = torch.zeros(max(most, graphs), dtype=torch.int64, device=device)
        self.decode_slots = torch.zeros_like(self.slots, dtype=torch.int32)
        self.before = torch.zeros_like(self.slots)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        context = vllm_config.compilation_config.static_forward_context
        several = any(getattr(layer, "has_step_forms", False) for layer in context.values())
        if several or request_inputs(vllm_config):
            return AttentionCGSupport.NEVER
        return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> StateMetadata:
        common = common_attn_metadata
        table = mamba_get_block_table_tensor(
            common.block_table_tensor,
            common.seq_lens,
            self.kv_cache_spec,
            self.vllm_config.cache_config.mamba_cache_mode,
        )[:, 0]
        decodes, prefills, _, _ = split_decodes_and_prefills(common, decode_threshold=1)
        n, starts = common.num_reqs, common.query_start_loc_cpu
        ends = common.seq_lens_cpu_upper_bound
        ends = (common.seq_lens.cpu() if ends is None else ends)[:n]
        tokens = starts[1 : n + 1] - starts[:n]
        lengths = (ends - tokens).clamp_(min=0)
        slots, before = self.slots[:n], self.before[:n]
        # padding of the batch of a CUDA graph has no tokens and slot 0, which belongs to no request
        before.copy_(common.seq_lens[:n] - (common.query_start_loc[1 : n + 1] - common.query_start_loc[:n]))
        before.clamp_(min=0)
        slots.copy_(torch.where(common.seq_lens[:n] > 0, table[:n], 0)).clamp_(min=0)
        decode_slots = self.decode_slots[:n].copy_(torch.where(slots > 0, slots, -1))
        new = (lengths[:decodes] == 0) & (ends[:decodes] > 0)
        if bool(new.any()):
            # a prompt of one token counts as decoding: clear its slot, in which another request may have left its state
            self._clear(slots[:decodes][new.to(slots.device)])
        metadata = StateMetadata(
            decodes,
            slots,
            decode_slots,
            before,
            lengths[:decodes].tolist(),
            lengths[decodes:].tolist(),
            tokens[decodes:].tolist(),
            common.query_start_loc[decodes : n + 1] - common.query_start_loc[decodes] if prefills else None,
            before[decodes:] == 0 if bool((lengths[decodes:] == 0).any()) else None,
        )
        if inputs := request_inputs(self.vllm_config):
            ranges = list(zip(lengths.tolist(), ends.tolist(), strict=True))
            if decodes:
                metadata.decode_inputs = inputs.of_rows(range(decodes), ranges[:decodes])
            metadata.prefill_inputs = [inputs.of_rows([i], [ranges[i]]) for i in range(decodes, n)]
        return metadata

    def _clear(self, slots: Tensor) -> None:
        layers = self.vllm_config.compilation_config.static_forward_context
        for name in self.layer_names:
            layers[name].pool.index_fill_(0, slots, 0)
