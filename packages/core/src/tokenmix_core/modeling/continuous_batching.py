"""Continuous batching in transformers' interface: `generate_batch` and `continuous_batching_context_manager`.

transformers' manager, request queues, request objects, logits processors and streams are used. `RequestScheduler`
selects the tokens of each step, `BatchProcessor` launches steps and reads their tokens, `RequestStates` holds states.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from copy import copy
from typing import Any

from torch import Tensor
from transformers import ContinuousBatchingConfig, GenerationConfig, LlamaConfig
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager
from transformers.generation.continuous_batching.utils import get_device_and_memory_breakdown

from tokenmix_core.modeling.batch_processor import BatchProcessor
from tokenmix_core.modeling.batch_scheduler import INPUTS
from tokenmix_core.modeling.cache_name import CACHE
from tokenmix_core.modeling.prefixes import Prefixes
from tokenmix_core.modeling.request_states import RequestStates

# maximum number of requests that run at the same time
_REQUESTS = 256
# maximum capacity in tokens that the scheduler is told, even if the states' size does not depend on tokens
_MOST_TOKENS = 1 << 22
# options of ContinuousBatchingConfig that have no effect
_IGNORED = (
    "max_blocks_per_request", "allow_block_sharing", "use_cuda_graph", "use_async_batching", "default_compile_level",
    "varlen_compile_config", "decode_compile_config", "scheduler_type",
)  # fmt: skip


class ServedModel:
    """Wraps a causal language model in the interface that transformers' manager expects of models with a paged cache.

    Args:
        model: the model, with `make_cache`, `decoding` and `state_bytes`.
    """

    tp_plan: dict[str, Any] = {}  # noqa: RUF012
    _supports_flash_attn = False

    def __init__(self, model: Any):
        self.model, self.device, self.dtype = model.eval(), model.device, model.dtype
        self.generation_config = model.generation_config
        text = model.config.get_text_config()
        # transformers derives defaults from the configuration of a placeholder: one layer with one head of size 1
        self.config = LlamaConfig(
            num_hidden_layers=1,
            hidden_size=1,
            head_dim=1,
            num_attention_heads=1,
            num_key_value_heads=1,
            vocab_size=text.vocab_size,
            eos_token_id=text.eos_token_id,
            pad_token_id=text.pad_token_id,
        )
        # for this name, transformers builds no masks
        self.config._attn_implementation = "flash_attention_2"
        self.states = RequestStates(model)

    def eval(self) -> ServedModel:
        """Return self: the model is always in evaluation mode."""
        return self

    def set_attn_implementation(self, name: str) -> None:
        """Do nothing, because the model keeps its own implementation of attention."""

    @property
    def _cached_continuous_batching_manager(self) -> Any:
        """transformers' manager for the next call, stored as an attribute of `model`, the object that callers hold."""
        return vars(self.model).get("_cached_continuous_batching_manager")

    @_cached_continuous_batching_manager.setter
    def _cached_continuous_batching_manager(self, manager: Any) -> None:
        self.model._cached_continuous_batching_manager = manager

    def _get_logits_processor(self, generation_config: GenerationConfig) -> Any:
        return self.model._get_logits_processor(generation_config)


class HybridBatchingManager(ContinuousBatchingManager):
    """transformers' manager of continuous batching for our models; `init_continuous_batching` returns it.

    Args:
        model: the causal language model.
        generation_config: as for transformers' manager.
        continuous_batching_config: as for transformers' manager, except that the default of `num_blocks` fills
            `max_memory_percent` of the free memory, that of `max_batch_tokens` is 8192, and that the options of block
            tables, block sharing, CUDA graphs, asynchronous batching, compilation and the scheduler's type are ignored;
            a warning names those that are set.
        workload_hints: as for transformers' manager.

    Attributes:
        draw: function that samples the next tokens of requests from their logits `[n, vocab]` and their ids; None
            samples by `generation_config`.
        on_prefix: called with a request's id and the number of its first tokens whose states a snapshot contains.

    Raises:
        ValueError: `cpu_offload_space` is not 0.
    """

    def __init__(
        self,
        model: Any,
        generation_config: GenerationConfig,
        continuous_batching_config: ContinuousBatchingConfig,
        workload_hints: Any = None,
    ):
        if continuous_batching_config.cpu_offload_space:
            raise ValueError("cpu_offload_space is not available: preempted requests are computed again")
        default = ContinuousBatchingConfig()
        if given := [x for x in _IGNORED if getattr(continuous_batching_config, x) != getattr(default, x)]:
            warnings.warn(
                f"ContinuousBatchingConfig sets {', '.join(given)} without effect: decoding steps have CUDA graphs of "
                "their own, and keep_prefixes shares the states of prompts",
                stacklevel=3,
            )
        config = copy(continuous_batching_config)
        # no block table and no shared blocks: shapes differ in every step, decoding steps have CUDA graphs of their
        # own, and `keep_prefixes` shares states
        config.max_blocks_per_request, config.allow_block_sharing = 0, False
        config.use_cuda_graph, config.use_async_batching, config.default_compile_level = False, False, 0
        config.varlen_compile_config = config.decode_compile_config = None
        if config.max_requests_per_batch is None:
            config.max_requests_per_batch = _REQUESTS
        self.draw: Callable[[Tensor, list[str]], Tensor] | None = None
        self.on_prefix: Callable[[str, int], object] = lambda request, tokens: None
        super().__init__(ServedModel(model), generation_config, config, workload_hints)  # type: ignore[arg-type]
        resolved = self.continuous_batching_config
        if resolved.num_blocks is None:
            resolved.num_blocks = max(1, _tokens_that_fit(model, resolved) // resolved.page_size)

    @property
    def max_tokens(self) -> int:
        """Maximum number of tokens of a request: its prompt and generated tokens."""
        config = self.continuous_batching_config
        return (config.num_blocks or 0) * config.page_size

    def keep_prefixes(self, budget: int) -> None:
        """Keep snapshots of the states after the first tokens of prompts, in at most `budget` bytes; 0 keeps none.

        A later prompt that begins with the same tokens, in the same modes and with the same weights and adapters,
        continues from a copy of such a snapshot. Snapshots are taken at multiples of `page_size` tokens. This call
        drops all earlier snapshots.

        Raises:
            ValueError: a negative number.
        """
        self.model.states.prefixes = Prefixes(  # type: ignore[attr-defined]
            self.continuous_batching_config.page_size, budget
        )

    def check_request(self, input_ids: Any, max_new_tokens: int | None) -> None:
        """Raise a ValueError for a request that can never run."""
        tokens = len(input_ids)
        if not tokens:
            raise ValueError("a request needs a prompt of at least one token")
        if tokens + (max_new_tokens or 1) > self.max_tokens:
            raise ValueError(
                f"a request of {tokens} tokens and {max_new_tokens or 'more'} new ones exceeds the pool's "
                f"{self.max_tokens} tokens: set num_blocks in ContinuousBatchingConfig"
            )

    def add_request(
        self,
        input_ids: Any,
        *args: Any,
        max_new_tokens: int | None = None,
        mixer_inputs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Add a request with extra mixer inputs by name; other arguments are those of transformers' manager."""
        limit = self.generation_config.max_new_tokens if max_new_tokens is None else max_new_tokens
        self.check_request(input_ids, limit)
        inputs = self.model.model.request_inputs(mixer_inputs or {}, len(input_ids))  # type: ignore[attr-defined]
        given = {INPUTS: inputs} if inputs else {}
        return super().add_request(input_ids, *args, max_new_tokens=max_new_tokens, **given, **kwargs)

    def _create_batch_processor(self) -> BatchProcessor:
        kept: Any = getattr(self, "batch_processor", None)
        if kept is None:
            return BatchProcessor(self)
        kept.reset()
        return kept


def init_manager(
    model: Any, generation_config: Any, continuous_batching_config: Any, workload_hints: Any
) -> HybridBatchingManager:
    """Return the manager of a model; the arguments are those of transformers' `init_continuous_batching`.

    Raises:
        ValueError: a version of transformers whose engine has another interface.
    """
    if CACHE != "cache":
        raise ValueError("continuous batching needs transformers 5.24 or newer: pip install -U transformers")
    config = copy(model.generation_config if generation_config is None else generation_config)
    if config.eos_token_id is None:
        # the engine uses −1 if there is no end token
        config.eos_token_id = -1
    return HybridBatchingManager(
        model, config, continuous_batching_config or ContinuousBatchingConfig(), workload_hints
    )


def _tokens_that_fit(model: Any, config: ContinuousBatchingConfig) -> int:
    """Return how many tokens the states of `max_requests_per_batch` requests can hold, at most `_MOST_TOKENS`.

    The states take `max_memory_percent` of the free memory.
    """
    _, total, reserved, allocated = get_device_and_memory_breakdown()
    # the memory of an earlier engine's pool is used again
    idle = model.step_store.pool
    used = max(reserved, allocated) - (0 if idle is None else idle.allocated_nbytes)
    free = (total - used) * (config.max_memory_percent or 0.9)
    # estimate a state's bytes as a constant plus a number per token
    short, long = (model.state_bytes(n) for n in (1 << 15, 1 << 16))
    per_token = (long - short) / (1 << 15)
    constant = max(0.0, short - per_token * (1 << 15)) * (config.max_requests_per_batch or _REQUESTS)
    if not per_token:
        return _MOST_TOKENS
    return max(0, min(_MOST_TOKENS, int((free - constant) / per_token)))
