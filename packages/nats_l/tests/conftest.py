"""Fixtures: kernels run on a GPU if there is one, else in Triton's interpreter; tests marked `gpu` need a GPU."""

import dataclasses

import pytest

from support.corpora import documents, token_file
from support.rank_pool import pool  # noqa: F401
from tokenmix_core.testing.fixtures import (  # noqa: F401
    device,
    kernels_are_interpreted_quickly,
    launch_cache_is_empty,
    override,
    pytest_collection_modifyitems,
    pytest_runtest_setup,
    unwritten_memory_is_nan,
)
from tokenmix_core.training.overrides import overridden


@pytest.fixture(scope="module")
def small_recipe(tmp_path_factory):
    """Return a function that makes a recipe: two tiny layers on `count` documents, with further flags of the command
    line and options of the NAtS-L layer."""

    def make(count, flags, **nats_l):
        from tokenmix_nats_l.recipes import RECIPES

        tokens = token_file(tmp_path_factory.mktemp("corpus"), documents(count))
        flags += " --logging_steps 1 --save_steps 3 --save_total_limit 2"
        flags += " --model.hidden_size 32 --model.num_hidden_layers 2 --model.intermediate_size 32"
        flags += " --model.mixers=[gated_delta_net,nats_l]"
        recipe = overridden(RECIPES["tiny"](), [*flags.split(), "--sources", str(tokens)])
        options = recipe.model["mixer_options"]
        options = {label: {**values, "num_heads": 2, "head_dim": 8} for label, values in options.items()}
        options["nats_l"] |= nats_l
        return dataclasses.replace(recipe, model={**recipe.model, "mixer_options": options})

    return make
