"""Tests of continuous batching; `ModelContract` inherits them and provides the models."""

from __future__ import annotations

import random
import time
from typing import ClassVar

import pytest
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from tokenmix_core.modeling.cache_name import CACHE


class ServingContract:
    """Tests that a request gets the same tokens in a changing batch as alone."""

    tokens: ClassVar[int]

    @pytest.mark.skipif(CACHE != "cache", reason="the engine before transformers 5.24 has another interface")
    @torch.no_grad()
    def test_requests_in_changing_batches_get_the_tokens_they_get_alone(self, model, ids):
        rng = random.Random(0)
        ends = int(ids.max())
        config = GenerationConfig(max_new_tokens=8, do_sample=False, pad_token_id=0, eos_token_id=ends)
        # 16 tokens per step split prompts into chunks, and the number of pages is too small, so that requests are
        # preempted
        pool = ContinuousBatchingConfig(page_size=8, num_blocks=12, max_batch_tokens=16)
        prompts = [ids[i % len(ids), : rng.choice((1, 3, 9, self.tokens))].tolist() for i in range(14)]
        limits = [rng.choice((1, 4, 8)) for _ in prompts]
        with model.continuous_batching_context_manager(
            generation_config=config, continuous_batching_config=pool
        ) as manager:
            names, results = [], {}
            for i, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
                names.append(manager.add_request(prompt, max_new_tokens=limit))
                if i % 5 == 4:
                    manager.cancel_request(names[-1])
                    # wait, so that later requests arrive while earlier ones are running
                    time.sleep(0.02)
            expected = {name for i, name in enumerate(names) if i % 5 != 4}
            deadline = time.monotonic() + 60
            while expected - set(results) and time.monotonic() < deadline:
                if (result := manager.get_result(timeout=1)) is not None and result.is_finished():
                    results[result.request_id] = result
            states = manager.model.states
        assert expected <= set(results)
        for name, prompt, limit in zip(names, prompts, limits, strict=True):
            if name in expected:
                # pass no further inputs, because the engine takes none
                alone = model.generate(torch.tensor([prompt]), generation_config=config, max_new_tokens=limit)
                assert results[name].error is None
                assert results[name].generated_tokens == alone[0, len(prompt) :].tolist()
        assert not len(states)
