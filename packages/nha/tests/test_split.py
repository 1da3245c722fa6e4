"""NHA and its baselines on rows that are split over processes: the losses and gradients of one process."""

from __future__ import annotations

import pytest

from support.rank_pool import ranks
from support.split_contract import check_models, require_equality
from tokenmix_nha.config import NhaConfig
from tokenmix_nha.model import NhaForCausalLM

FIELDS = {
    "vocab_size": 53,
    "hidden_size": 16,
    "intermediate_size": 16,
    "initializer_range": 0.2,
    "pad_token_id": 0,
}
NHA = {"type": "nha", "num_heads": 4, "num_kv_heads": 2, "head_dim": 4, "slots": 3, "gate_normalizer": 2.0}


def config(**options):
    layers = {"mixers": list(options), "num_hidden_layers": len(options), "mixer_options": options}
    return NhaConfig(**FIELDS, **layers)


MODELS = {
    "windows": config(a=NHA | {"window": 5}, b=NHA | {"window": "full"}, c=NHA | {"window": 0}, d=NHA | {"window": 50}),
    "both": config(a=NHA | {"window": 7, "positions": "both"}, b=NHA | {"window": 3, "positions": "none"}),
    "baselines": config(
        a={"type": "gla", "num_heads": 2},
        b={"type": "gated_slot_attention", "num_heads": 4, "num_kv_heads": 2, "slots": 3},
    ),
}


@pytest.mark.parametrize("size", ranks(2, 3))
def test_losses_and_gradients_are_those_of_one_process(pool, size):
    require_equality(pool(size, check_models, NhaForCausalLM, MODELS if size != 2 else {"windows": MODELS["windows"]}))


def test_ablations_are_refused_by_name(pool):
    ablation = {"ablation": config(a=NHA | {"window": 5, "positions": "learned"})}
    (sentence,) = pool(2, check_models, NhaForCausalLM, ablation).values()
    assert sentence.startswith("NhaMixer with these options cannot split")
