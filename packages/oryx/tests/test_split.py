"""Oryx on rows that are split over processes: the losses and gradients of one process."""

from __future__ import annotations

from functools import partial

import pytest

from tokenmix_core.testing.rank_pool import RankPool
from tokenmix_core.testing.split_contract import TOLERANCE, check_models
from tokenmix_oryx.config import OryxConfig
from tokenmix_oryx.model import OryxForCausalLM

FIELDS = {"vocab_size": 53, "hidden_size": 12, "intermediate_size": 12, "initializer_range": 0.2, "pad_token_id": 0}
DELTA = {"type": "oryx", "head_dim": 4, "linear_mixer": "gated_delta_net", "attention_l2_norm": "query_key"}
MAMBA2 = {"type": "oryx", "head_dim": 4, "shared_query": True}


CONFIG = OryxConfig(**FIELDS, mixers=["a", "b"], num_hidden_layers=2, mixer_options={"a": DELTA, "b": MAMBA2})
MIXED = [(0, "linear"), (7, "attention"), (20, "linear"), (41, "attention")]


@pytest.fixture(scope="module")
def pool():
    pool = RankPool(3)
    yield pool
    pool.close()


@pytest.mark.parametrize(("size", "mode"), [(2, "linear"), (2, "attention"), (3, MIXED)])
def test_losses_and_gradients_are_those_of_one_process(pool, size, mode):
    errors = pool(size, partial(check_models, mode=mode), OryxForCausalLM, {"oryx": CONFIG})
    worst = max(errors, key=lambda key: errors[key])
    assert errors[worst] <= TOLERANCE, f"{worst}: {errors[worst]}"
