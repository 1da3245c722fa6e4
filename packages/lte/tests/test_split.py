"""LTE and NSA on rows that are split over processes: the losses, gradients and statistics of one process."""

from __future__ import annotations

import pytest
import torch

from support.rank_pool import ranks
from support.split_contract import check_models, require_equality, split_statistics
from tokenmix_lte.config import LteConfig
from tokenmix_lte.model import LteForCausalLM

FIELDS = {"vocab_size": 53, "hidden_size": 16, "intermediate_size": 16, "initializer_range": 0.2, "pad_token_id": 0}
LTE = {"type": "lte", "num_heads": 6, "num_kv_heads": 3, "head_dim": 4, "window": 13, "cap": 4, "dropout": 0.0}
NSA = {"type": "nsa", "num_heads": 6, "num_kv_heads": 3, "head_dim": 4, "block": 4, "blocks": 4, "window": 7}


def config(**options):
    layers = {"mixers": list(options), "num_hidden_layers": len(options), "mixer_options": options}
    return LteConfig(**FIELDS, **layers)


MODELS = {
    "lte": (LTE, LTE | {"estimator": "inside", "train_capped": True, "scorer": "mlp"}),
    "without scores": (LTE | {"scorer": "uniform", "train_capped": True}, LTE | {"scorer": "causal"}),
    "nsa": (NSA, LTE),
}
SIZES = [(size, name) for size in ranks() for name in MODELS] or [(2, "without scores"), (3, "lte"), (3, "nsa")]


@pytest.mark.parametrize(("size", "name"), SIZES)
def test_losses_and_gradients_are_those_of_one_process(pool, size, name):
    # each rank needs a key head
    heads = {"num_heads": max(6, 2 * size), "num_kv_heads": max(3, size)}
    first, second = MODELS[name]
    require_equality(pool(size, check_models, LteForCausalLM, {name: config(a=first | heads, b=second | heads)}))


def test_statistics_of_heads_are_those_of_one_process_on_all_ranks(pool):
    split, single = pool(2, split_statistics, LteForCausalLM, config(a=LTE | {"train_capped": True}))
    assert {"kept_share", "held_share", "scored_share"} < set(single)
    assert single["model.layers.0.mixer.sparsity.count"] == 1
    for name, expected in single.items():
        torch.testing.assert_close(split[name], expected, msg=name)
