"""Test the scheduler of our models in vLLM."""

from __future__ import annotations

import pickle
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed: nox -s vllm")

from vllm.utils.import_utils import resolve_obj_by_qualname  # pyright: ignore[reportMissingImports]
from vllm.v1.core.kv_cache_manager import KVCacheManager  # pyright: ignore[reportMissingImports]
from vllm.v1.kv_cache_interface import (  # pyright: ignore[reportMissingImports]
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
)
from vllm.v1.request import RequestStatus  # pyright: ignore[reportMissingImports]

from served_by_vllm import engine, generated_tokens, prompts_of, served_tokens
from tokenmix_core.integrations.vllm.scheduler import ServedConfig, allocate_only_blocks, make_scheduler
from tokenmix_core.modeling import HybridConfig, HybridForCausalLM

BLOCK, LENGTH = 16, 128


def manager() -> KVCacheManager:
    keys = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=16, dtype=torch.float32)
    state = MambaSpec(shapes=((8,),), dtypes=(torch.int32,), block_size=LENGTH)
    groups = [KVCacheGroupSpec(["keys"], keys), KVCacheGroupSpec(["first"], state), KVCacheGroupSpec(["second"], state)]
    config = KVCacheConfig(num_blocks=24, kv_cache_tensors=[], kv_cache_groups=groups)
    return KVCacheManager(
        config, max_model_len=LENGTH, scheduler_block_size=LENGTH, hash_block_size=BLOCK, enable_caching=False
    )


def test_random_requests_get_the_blocks_of_the_unchanged_manager():
    ours, theirs, rng = manager(), manager(), random.Random(0)
    asked: list[str] = []
    whole = ours.coordinator.get_num_blocks_to_allocate
    ours.coordinator.get_num_blocks_to_allocate = lambda *a, **k: (asked.append(""), whole(*a, **k))[1]
    allocate_only_blocks(ours)
    running: dict[int, Any] = {}
    full = calls = 0
    for i in range(3000):
        if not running or (len(running) < 6 and rng.random() < 0.1):
            prompt = rng.randint(1, 40)
            running[i] = SimpleNamespace(
                request_id=str(i), num_computed_tokens=0, num_tokens=prompt, num_prompt_tokens=prompt,
                num_in_flight_tokens=0, status=RequestStatus.RUNNING,
            )  # fmt: skip
        key = rng.choice(list(running))
        request = running[key]
        new = 1 if request.num_computed_tokens else request.num_prompt_tokens
        found = [x.allocate_slots(request, new, num_lookahead_tokens=0) for x in (ours, theirs)]
        calls += 1
        full += found[1] is None
        assert [x and x.get_block_ids() for x in found] == [found[1] and found[1].get_block_ids()] * 2
        if found[0] is not None:
            request.num_computed_tokens += new
            request.num_tokens = max(request.num_tokens, request.num_computed_tokens)
        if found[0] is None or request.num_computed_tokens == LENGTH or rng.random() < 0.01:
            del running[key]
            for x in (ours, theirs):
                x.free(request)
    assert full
    assert len(asked) < calls / 4
    assert ours.block_pool.get_num_free_blocks() == theirs.block_pool.get_num_free_blocks()


def test_preempted_requests_generate_the_same_tokens(tmp_path):
    torch.manual_seed(0)
    options = {"gated_delta_net": {"num_heads": 1, "head_dim": 16}, "attention": {"num_heads": 4, "head_dim": 64}}
    sizes = {"vocab_size": 199, "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96}
    config = HybridConfig(**sizes, mixers=list(options), mixer_options=options, initializer_range=0.3, eos_token_id=0)
    model = HybridForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    prompts = prompts_of(199, (40, 60, 90, 33, 70, 5))
    expected = generated_tokens(model, prompts, 60)
    # two requests run; keys of the first one that has more than 128 tokens find no free block
    memory = {"num_gpu_blocks_override": 5, "max_model_len": 256}
    with engine(tmp_path, dtype="float32", enable_prefix_caching=False, **memory) as llm:
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        counts = []
        preempt = scheduler._preempt_request
        scheduler._preempt_request = lambda *a, **k: (counts.append(1), preempt(*a, **k))[1]
        assert served_tokens(llm, prompts, 60)[0] == expected
        assert counts
        assert scheduler.kv_cache_manager.allocate_slots.__module__.startswith("tokenmix_core")


def test_versions_with_two_runners_select_the_second_one():
    class Config(SimpleNamespace):
        def _is_default_v2_model_runner_model(self) -> bool:
            return False

    config = Config(scheduler_config=SimpleNamespace(scheduler_cls=None))
    ServedConfig.verify_and_update_config(config)
    assert config._is_default_v2_model_runner_model()
    assert pickle.loads(pickle.dumps(vars(config)["_is_default_v2_model_runner_model"]))()
    assert resolve_obj_by_qualname(config.scheduler_config.scheduler_cls) is make_scheduler


def test_a_user_selects_another_scheduler(tmp_path):
    torch.manual_seed(0)
    sizes = {"vocab_size": 199, "hidden_size": 64, "num_hidden_layers": 1, "intermediate_size": 96}
    HybridForCausalLM(HybridConfig(**sizes, mixers=["gated_delta_net"], eos_token_id=0)).save_pretrained(tmp_path)
    with engine(tmp_path, scheduler_cls="vllm.v1.core.sched.scheduler.Scheduler") as llm:
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        assert scheduler.kv_cache_manager.allocate_slots.__module__.startswith("vllm")
