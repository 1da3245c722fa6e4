"""Oryx on rows that are split over processes: the losses and gradients of one process."""

from __future__ import annotations

from functools import partial

import pytest

from support.rank_pool import ranks
from support.split_contract import check_models, require_equality
from tokenmix_oryx.config import OryxConfig
from tokenmix_oryx.model import OryxForCausalLM

FIELDS = {"vocab_size": 53, "intermediate_size": 12, "initializer_range": 0.2, "pad_token_id": 0}
DELTA = {"type": "oryx", "head_dim": 4, "linear_mixer": "gated_delta_net", "attention_l2_norm": "query_key"}
MAMBA2 = {"type": "oryx", "head_dim": 4, "shared_query": True}

MIXED = [(0, "linear"), (7, "attention"), (20, "linear"), (41, "attention")]
MODES = ("linear", "attention", MIXED)
SIZES = [(size, mode) for size in ranks() for mode in MODES] or [(2, "linear"), (2, "attention"), (3, MIXED)]


@pytest.mark.parametrize(("size", "mode"), SIZES)
def test_losses_and_gradients_are_those_of_one_process(pool, size, mode):
    # each rank needs a head of 4 channels
    layers = {"hidden_size": max(12, 4 * size), "mixers": ["a", "b"], "num_hidden_layers": 2}
    config = OryxConfig(**FIELDS, **layers, mixer_options={"a": DELTA, "b": MAMBA2})
    require_equality(pool(size, partial(check_models, mode=mode), OryxForCausalLM, {"oryx": config}))
