"""Tests of how a model takes and returns its cache; `ModelContract` inherits them and provides the models."""

from __future__ import annotations

import warnings
from typing import ClassVar

import pytest
import torch

from tokenmix_core.modeling.cache_name import NAMES
from tokenmix_core.testing.closeness import relative_error
from tokenmix_core.testing.fake_cuda_graph import graphs_everywhere


class CacheContract:
    """Tests of the argument names under which a model takes its cache, and of how it updates and returns the cache."""

    inputs: ClassVar[dict]
    tokens: ClassVar[int]

    @torch.no_grad()
    def test_a_cache_that_is_given_is_read_and_updated_whatever_use_cache_says(self, model, ids):
        whole, cache, start = model(ids, use_cache=False, **self.inputs).logits, model.make_cache(), 0
        for part in ids.split([5, 3, self.tokens - 8], 1):
            out = model(part, cache=cache, use_cache=False, **self.inputs)
            assert out.cache is cache
            assert relative_error(out.logits, whole[:, start : start + part.shape[1]]) < 1e-4
            start += part.shape[1]

    @torch.no_grad()
    def test_a_cache_goes_by_both_of_its_names(self, model, ids):
        whole = model(ids, use_cache=False, **self.inputs).logits
        options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, **self.inputs}
        expected = model.generate(ids, **options)
        for name in NAMES:
            cache = model.make_cache()
            for call in (model.model, model):
                cache.reset()
                out = call(ids[:, :5], **{name: cache}, **self.inputs)
                for other in NAMES:
                    assert getattr(out, other) is out[other] is out.get(other) is cache
                    assert other in out
            rest = model(ids[:, 5:], **{name: cache}, **self.inputs).logits
            assert relative_error(rest, whole[:, 5:]) < 1e-4
            cache.reset()
            model(ids[:, :5], **{name: cache}, **self.inputs)
            assert torch.equal(model.generate(ids, **{name: cache}, **options), expected)
            assert cache.length == self.tokens + 3
        with pytest.raises(ValueError, match="two names of one argument"):
            model(ids, **{name: model.make_cache() for name in NAMES}, **self.inputs)

    def test_our_own_calls_use_no_deprecated_name(self, model, ids, monkeypatch):
        said = []
        monkeypatch.setattr("transformers.utils.generic.logger.warning_once", lambda *x: said.append(x))
        options = {"max_new_tokens": 3, "pad_token_id": 0, "return_dict_in_generate": True, **self.inputs}
        with warnings.catch_warnings(), graphs_everywhere():
            warnings.simplefilter("error", FutureWarning)
            model(ids, labels=ids, **self.inputs).loss.backward()
            for given in ({}, {"decoding_graph": False}, {"num_beams": 2}, {"prefill_chunk_size": 4}):
                model.generate(ids, cache=model.make_cache(), **options, **given)
                model.generate(ids, **options, **given)
            with torch.no_grad():
                for chunk in model(ids[:, :-1], **self.inputs), model.model(ids[:, :-1], **self.inputs):
                    model(ids[:, -1:], cache=chunk.cache, **self.inputs)
                    assert chunk.to_tuple()
        assert not said
