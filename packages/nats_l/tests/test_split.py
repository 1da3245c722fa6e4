"""NAtS-L on rows that are split over processes: the losses and gradients of one process."""

from __future__ import annotations

import pytest
import torch

from support.rank_pool import ranks
from support.split_contract import check_models, require_equality, split_statistics
from tokenmix_nats_l.config import NatsLConfig
from tokenmix_nats_l.model import NatsLForCausalLM

FIELDS = {"vocab_size": 53, "hidden_size": 16, "intermediate_size": 16, "initializer_range": 0.2, "pad_token_id": 0}
NATS_L = {"type": "nats_l", "num_heads": 3, "head_dim": 8, "expand_v": 1.0, "num_softmax_heads": 6}


def config(**options):
    layers = {"mixers": list(options), "num_hidden_layers": len(options), "mixer_options": options}
    return NatsLConfig(**FIELDS, **layers)


MODELS = {
    "learned": ({"rope": True, "softmax_share": 0.4}, {"budget": 0.2}),
    "ablations": ({"own_chunk": "linear", "weights": "inputs"}, {"own_chunk": "softmax"}),
}
SIZES = [(size, name) for size in ranks() for name in MODELS] or [(2, "ablations"), (3, "learned")]


@pytest.mark.parametrize(("size", "name"), SIZES)
def test_losses_and_gradients_are_those_of_one_process(pool, size, name):
    # each rank needs a head
    layer = NATS_L | {"num_heads": max(3, size), "num_softmax_heads": max(6, 2 * size)}
    first, second = MODELS[name]
    # chunks of 64 tokens end inside spans and cross them
    require_equality(pool(size, check_models, NatsLForCausalLM, {name: config(a=layer | first, b=layer | second)}))


def test_more_ranks_than_heads_are_refused_by_one_sentence(pool):
    few = {"few": config(a=NATS_L | {"num_heads": 2, "num_softmax_heads": 2})}
    (sentence,) = pool(3, check_models, NatsLForCausalLM, few).values()
    assert "2 heads of keys cannot be divided among 3 ranks" in sentence


def test_types_and_thresholds_are_those_of_one_process_on_all_ranks(pool):
    split, single = pool(3, split_statistics, NatsLForCausalLM, config(a=NATS_L | {"softmax_share": 0.4}))
    assert 0 < single["softmax_share"].mean() < 1
    assert single["model.layers.0.mixer.threshold.sums"].any()
    for name, expected in single.items():
        torch.testing.assert_close(split[name], expected, msg=name)
