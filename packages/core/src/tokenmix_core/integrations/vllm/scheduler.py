"""vLLM's scheduler, without the work per request and step that decoding does not need.

vLLM's manager of blocks asks, in each step and for each request and group of layers, which blocks to free, how many to
allocate, and whether these exist. Most decoding steps need no block: a state keeps its slot, and a key's block has
memory for hundreds of tokens.
"""

from __future__ import annotations

import copy
from typing import Any

from vllm.model_executor.models.config import (  # pyright: ignore[reportMissingImports]
    MODELS_CONFIG_MAP,
    VerifyAndUpdateConfig,
)


class ServedConfig(VerifyAndUpdateConfig):
    """vLLM's hook for the configuration of our models.

    It selects `make_scheduler`, unless the user selects another scheduler, and the second of vLLM's model runners,
    unless `VLLM_USE_V2_MODEL_RUNNER` is set or this runner lacks a feature that the user requests.
    """

    @classmethod
    def verify_and_update_config(cls, vllm_config: Any) -> None:
        scheduler = vllm_config.scheduler_config
        if scheduler.scheduler_cls is None:
            scheduler.scheduler_cls = f"{__name__}.{make_scheduler.__name__}"
        # earlier versions than 0.32 have a list of models for this runner, later ones select it for all models
        if hasattr(vllm_config, "_is_default_v2_model_runner_model"):
            object.__setattr__(vllm_config, "_is_default_v2_model_runner_model", _second_runner)


def _second_runner() -> bool:
    # vLLM sends the configuration to other processes, and a lambda cannot be pickled
    return True


def make_scheduler(vllm_config: Any, **arguments: Any) -> Any:
    """Return the scheduler that vLLM would use, with `allocate_only_blocks` if prefixes are not cached."""
    config = copy.copy(vllm_config.scheduler_config)
    config.scheduler_cls = None
    scheduler = config.get_scheduler_cls()(vllm_config=vllm_config, **arguments)
    if not vllm_config.cache_config.enable_prefix_caching:
        allocate_only_blocks(scheduler.kv_cache_manager)
    return scheduler


def allocate_only_blocks(manager: Any) -> None:
    """Make vLLM's manager of blocks return at once for a request whose blocks have memory for its new tokens.

    A sliding window then frees its blocks when its request next needs one. With prefix caching each step also hashes
    blocks, so the manager must not cache prefixes.
    """
    allocate, empty = manager.allocate_slots, manager.empty_kv_cache_blocks
    groups = [(x.req_to_blocks, x.block_size) for x in manager.coordinator.single_type_managers]

    def allocate_slots(request: Any, num_new_tokens: int, *args: Any, **options: Any) -> Any:
        end = request.num_computed_tokens + num_new_tokens
        if num_new_tokens and not args and not any(options.values()):
            for blocks, size in groups:
                if len(blocks.get(request.request_id, ())) * size < end:
                    break
            else:
                return empty
        return allocate(request, num_new_tokens, *args, **options)

    manager.allocate_slots = allocate_slots


def register_config(architecture: str) -> None:
    """Register the hook for an architecture."""
    MODELS_CONFIG_MAP[architecture] = ServedConfig
