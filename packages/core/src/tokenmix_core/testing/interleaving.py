"""Tests of models that combine several kinds of mixers; test classes inherit them."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from typing import Any, ClassVar

import pytest
import torch

from tokenmix_core.modeling import HybridConfig, HybridForCausalLM, find_mixer, known_mixers
from tokenmix_core.testing.closeness import relative_error
from tokenmix_core.testing.models import left_padded, logits_in_parts

# options of a small layer of width 32, for each mixer by its registered name
Options = Mapping[str, dict[str, Any]]
CORE: Options = {
    "attention": {"num_heads": 4, "num_kv_heads": 2},
    "gated_delta_net": {"num_heads": 2, "head_dim": 16},
    "mamba2": {"head_dim": 16, "state_size": 16},
}


class InterleavingContract:
    """Tests that any two mixers, and all together, can form a model. A subclass named `TestX` sets `mixers`.

    Attributes:
        mixers: options of a small layer of width 32, by registered name, for every mixer of the package.
        others: options of the mixers with which these are combined; by default core's mixers.
        configs: configuration and model classes of the package, by name; a model of each is tested with all mixers.
        tokens: length of the test sequences; exceeds all windows and chunks in the options.
    """

    mixers: ClassVar[Options] = {}
    others: ClassVar[Options] = CORE
    configs: ClassVar[dict[str, tuple[type[HybridConfig], type[HybridForCausalLM]]]] = {}
    tokens: ClassVar[int] = 23

    def pytest_generate_tests(self, metafunc):
        if "case" in metafunc.fixturenames:
            cases = [*map(" ".join, self.groups()), *self.configs]
            # pytest does not display longer names
            ids = [case if len(case) < 90 else "together" for case in cases]
            metafunc.parametrize("case", cases, ids=ids, scope="class")

    @classmethod
    def groups(cls) -> list[tuple[str, ...]]:
        """Return the groups of mixers that core's model classes combine: all pairs with a mixer of the package."""
        pairs = combinations(sorted({*cls.others, *cls.mixers}), 2)
        return [pair for pair in pairs if not cls.mixers.keys().isdisjoint(pair)]

    @pytest.fixture
    def model(self, case) -> HybridForCausalLM:
        known = {**self.others, **self.mixers}
        config_class, causal_lm = self.configs.get(case, (HybridConfig, HybridForCausalLM))
        # the package's own model has one layer per mixer; a pair has four layers, in which the two mixers alternate, so
        # that each mixer also follows the other
        labels = list(known) if case in self.configs else case.split() * 2
        torch.manual_seed(0)
        config = config_class(
            vocab_size=53,
            hidden_size=32,
            num_hidden_layers=len(labels),
            intermediate_size=32,
            mixers=labels,
            mixer_options={label: known[label] for label in labels},
            initializer_range=0.2,
            pad_token_id=0,
        )
        return causal_lm(config).eval()

    @pytest.fixture
    def ids(self):
        return torch.randint(3, 53, (2, self.tokens), generator=torch.Generator().manual_seed(1))

    @torch.no_grad()
    def test_interleaved_mixers_decode_as_they_read(self, model, ids):
        whole = model(ids, use_cache=False).logits
        parts = [1, 1, self.tokens - 9, 1, 1, 3, 1, 1]
        assert relative_error(logits_in_parts(model, ids, parts), whole) < 1e-4
        lengths = [self.tokens, self.tokens - 9]
        padded = logits_in_parts(model, ids, [self.tokens - 2, 1, 1], left_padded(lengths, self.tokens))
        alone = model(ids[1:, -lengths[1] :], use_cache=False).logits[0]
        assert relative_error(padded[1, -lengths[1] :], alone) < 1e-4

    def test_interleaved_mixers_train(self, model, ids):
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        optimizer, losses = torch.optim.SGD(model.train().parameters(), lr=1e-3), []
        for _ in range(2):
            optimizer.zero_grad()
            loss = model(ids, labels=ids).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
        assert losses[1] < losses[0]
        for i, layer in enumerate(model.model.layers):
            moved = [n for n, p in layer.named_parameters() if not torch.equal(p, before[f"model.layers.{i}.{n}"])]
            assert any(name.startswith("mixer.") for name in moved), i

    def test_a_model_of_interleaved_mixers_comes_back_as_it_was_saved(self, model, ids, tmp_path):
        model.save_pretrained(tmp_path)
        again = type(model).from_pretrained(tmp_path)
        assert again.config.labels == model.config.labels
        with torch.no_grad():
            assert torch.equal(again(ids, use_cache=False).logits, model(ids, use_cache=False).logits)

    def test_no_mixer_of_the_package_is_left_out(self):
        home = {name: find_mixer(name).__module__.partition(".")[0] for name in known_mixers()}
        packages = {home[name] for name in self.mixers}
        assert {*self.others, *self.mixers} >= {name for name in home if home[name] in packages}
