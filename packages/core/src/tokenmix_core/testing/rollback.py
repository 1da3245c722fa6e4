"""Tests of `HybridCache.crop` and of assisted decoding; `ModelContract` inherits them and provides the models."""

from __future__ import annotations

import copy
import random
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from tokenmix_core.testing.closeness import relative_error


class RollbackContract:
    """Tests that a cropped cache behaves like a cache that never contained the removed tokens."""

    inputs: ClassVar[dict]
    tokens: ClassVar[int]

    @torch.no_grad()
    def test_calls_and_crops_in_any_order_equal_one_call(self, model, ids):
        whole, rng = model(ids, use_cache=False, **self.inputs).logits, random.Random(0)
        for kept in (2, 6):
            cache, end, removed, longest = model.make_cache(record=kept), 0, 0, 0
            while end < self.tokens or removed < self.tokens:
                new = min(rng.choice((1, 1, 3, 8)), self.tokens - end)
                if new:
                    logits = model(ids[:, end : end + new], cache=cache, **self.inputs).logits
                    assert relative_error(logits, whole[:, end : end + new]) < 1e-4, (kept, end, new)
                    end += new
                longest = max(longest, end)
                # some cases crop twice in a row: then pending tokens (kept by the first crop, but absent in the
                # restored states) are removed too
                for wanted in rng.choice(((0,), (1,), (2,), (1, 1))):
                    less = min(wanted, end - max(longest - kept, 0))
                    cache.crop(-less)
                    end, removed = end - less, removed + less
                    assert cache.get_seq_length() == end

    @torch.no_grad()
    def test_crop_with_padding_and_changes_of_the_batch(self, model, ids):
        mask = torch.ones_like(ids[:, :10])
        mask[1, :4] = 0
        whole = model(ids, use_cache=False, **self.inputs).logits
        row = model(ids[1:2, 4:], use_cache=False, **self.inputs).logits
        cache = model.make_cache(record=8)
        model(ids[:, :6], attention_mask=mask[:, :6], cache=cache, **self.inputs)
        model(ids[:, 6:10], attention_mask=mask, cache=cache, **self.inputs)
        cache.crop(-5)
        cache.reorder_cache(torch.tensor([1, 0]))
        again = copy.deepcopy(cache)
        for held in (cache, again):
            out = model(ids[[1, 0], 5:9], attention_mask=mask[[1, 0], :9], cache=held, **self.inputs).logits
            assert relative_error(out[1], whole[0, 5:9]) < 1e-4
            assert relative_error(out[0], row[0, 1:5]) < 1e-4

    @pytest.mark.parametrize("right", [0.0, 0.6, 1.0])
    @torch.no_grad()
    def test_assisted_decoding_equals_greedy_decoding(self, model, ids, monkeypatch, right):
        options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, **self.inputs}
        greedy = model.generate(ids[:1], **options)
        drafts = _Drafts(greedy, right)
        monkeypatch.setattr(type(model), "_get_candidate_generator", lambda *a, **k: drafts)
        assert torch.equal(model.generate(ids[:1], prompt_lookup_num_tokens=3, **options), greedy)
        tokens = greedy.shape[1] - self.tokens
        assert drafts.calls <= tokens if right else drafts.calls == tokens


class _Drafts:
    """A candidate generator whose drafted tokens are each correct with a given probability."""

    requires_model_outputs = False

    def __init__(self, answer: Tensor, right: float):
        self.answer, self.right, self.calls = answer, right, 0
        self.rng = random.Random(0)

    def get_candidates(self, input_ids: Tensor, **kwargs) -> tuple[Tensor, None]:
        """Return the token ids followed by up to three drafted tokens."""
        self.calls += 1
        start = input_ids.shape[1]
        draft = self.answer[:, start : min(start + 3, self.answer.shape[1] - 1)].clone()
        for i in range(draft.shape[1]):
            if self.rng.random() >= self.right:
                draft[:, i] = (draft[:, i] + 1).clamp(min=1) % int(self.answer.max() + 1)
        return torch.cat((input_ids, draft), 1), None

    def update_candidate_strategy(self, *args) -> None:
        """Do nothing, because drafts do not depend on which tokens were accepted."""
