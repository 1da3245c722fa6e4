"""Recipes: the paper's sizes, differences between recipes, and whole runs."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from support.recipes import check_shrinks
from tokenmix_core.training.overrides import overridden
from tokenmix_lte.recipes import ABLATIONS, RECIPES


def parameters(name: str) -> int:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(RECIPES[name]().model_config()).num_parameters()


@pytest.mark.parametrize("name", list(RECIPES))
def test_every_recipe_is_complete(name):
    recipe = RECIPES[name]()
    assert recipe.name == name
    recipe.optimizer.split(recipe.data.seq_len, 1)
    again = overridden(recipe, ["--seed", "7"])
    assert again.values() == {**recipe.values(), "seed": 7}
    assert all(make(recipe) for make in recipe.callbacks)


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("gdn-0.4b", 367.0), ("gdn-swa-0.4b", 354.0), ("gdn-attention-0.4b", 354.0), ("lalte-0.4b", 360.2),
        ("lansa-0.4b", 358.4), ("nsa-0.4b", 349.8), ("transformer-0.4b", 341.1), ("lte-0.4b", 353.5),
        ("gdn-1.4b", 1466), ("gdn-swa-1.4b", 1340), ("gdn-attention-1.4b", 1340), ("lalte-1.4b", 1343),
        ("lansa-1.4b", 1323), ("nsa-1.4b", 1180), ("transformer-1.4b", 1213), ("lte-1.4b", 1220),
    ],
)  # fmt: skip
def test_models_have_the_paper_s_parameters(name, millions):
    assert abs(parameters(name) / (millions * 1e6) - 1) < 1e-3


@pytest.mark.parametrize("size", ["0.4b", "1.4b"])
def test_models_of_a_size_differ_in_their_mixers_alone(size):
    def settings(name):
        recipe = RECIPES[f"{name}-{size}"]()
        return recipe.data, recipe.optimizer, {**recipe.model, "mixers": None, "mixer_options": None}

    for name in ("gdn", "gdn-swa", "gdn-attention", "transformer", "lte", "lansa", "nsa"):
        assert settings(name) == settings("lalte")
    config = RECIPES[f"lalte-{size}"]().model_config()
    assert config.mixers == ["gated_delta_net", "lte"] * 12


@pytest.mark.parametrize("name", list(ABLATIONS))
def test_an_ablation_changes_the_options_it_names_and_nothing_else(name):
    paper, ablated = RECIPES["lalte-0.4b"](), RECIPES[f"lalte-0.4b-{name}"]()
    options = {**paper.model["mixer_options"]["lte"], **ABLATIONS[name]}
    assert ablated.model["mixer_options"]["lte"] == options
    assert {**ablated.model, "mixer_options": None} == {**paper.model, "mixer_options": None}
    assert bool(ablated.callbacks) == (options.get("scorer") != "none")


@pytest.mark.parametrize("size", ["small", "100m"])
def test_recall_models_have_similar_sizes_and_hold_fewer_tokens_than_a_row(size):
    transformer = parameters(f"recall-transformer-{size}")
    for name in RECIPES:
        if name.startswith("recall-") and name.endswith(size):
            # in a small model the scorer is a larger part
            assert abs(parameters(name) / transformer - 1) < (0.25 if size == "small" else 0.06), name
    recipe = RECIPES[f"recall-lalte-{size}"]()
    options = recipe.model["mixer_options"]["lte"]
    assert options["window"] + options["cap"] < recipe.data.seq_len / 2
    window = RECIPES[f"recall-gdn-swa-{size}"]().model["mixer_options"]["attention"]["window"]
    assert window == options["window"] + options["cap"] // 2


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_flags_shrink_every_recipe(name):
    check_shrinks(RECIPES[name]())
