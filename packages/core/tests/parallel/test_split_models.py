"""Test that models on rows that are split over processes have the losses and gradients of one process."""

from __future__ import annotations

import pytest

from support.rank_pool import ranks
from support.split_contract import (
    TOLERANCE,
    check_models,
    core_models,
    refusals,
    require_equality,
    traffic_of,
)
from support.split_inference import split_losses, split_prompts
from tokenmix_core.modeling import HybridConfig, HybridForCausalLM

CONFIGS = {name: HybridConfig(**fields) for name, fields in core_models().items()}
# by default all models on three ranks, and one model on two and four
SIZES = [(size, name) for size in ranks() for name in CONFIGS] or [
    (2, "hybrid"),
    (4, "hybrid"),
    *((3, x) for x in CONFIGS),
]


@pytest.mark.parametrize(("size", "name"), SIZES)
def test_losses_and_gradients_are_those_of_one_process(pool, size, name):
    require_equality(pool(size, check_models, HybridForCausalLM, {name: CONFIGS[name]}))


def test_layers_that_are_computed_again_know_the_split(pool):
    require_equality(pool(2, check_models, HybridForCausalLM, {"hybrid": CONFIGS["hybrid"]}, True))


def test_bytes_are_counted_by_layer_and_operation_and_none_are_sent_for_documents_within_ranks(pool):
    across, within = pool(2, traffic_of, HybridForCausalLM, CONFIGS["hybrid"])
    assert not within
    layers = [["short_conv", "chunk_gated_delta_rule"], ["attention"], ["short_conv", "chunk_ssd"], ["attention"]]
    expected = {(i, name) for i, names in enumerate(layers) for name in names}
    assert set(across) == expected | {(i, f"{name}, backward") for i, name in expected}
    # float64: the last 3 tokens of q, k and v before the span, from rank 0 to rank 1
    assert across[0, "short_conv"] == 3 * (8 + 8 + 32) * 8


def test_what_cannot_be_split_is_refused_by_one_sentence_on_all_ranks(pool):
    for sentences in zip(*pool(2, refusals, HybridForCausalLM, CONFIGS["attention"]), strict=True):
        assert len(set(sentences)) == 1
        assert sentences[0].count(". ") == 0


def test_losses_by_position_of_rows_of_an_odd_length_are_those_of_one_process(pool):
    # logits enter the loss in float32
    assert pool(3, split_losses, HybridForCausalLM, CONFIGS["hybrid"]) <= 1e-6


def test_a_split_prompt_ends_in_the_states_of_one_process_on_every_rank(pool):
    errors = pool(3, split_prompts, HybridForCausalLM, CONFIGS["hybrid"])
    assert max(errors.values()) <= TOLERANCE, errors
