"""Models on rows that are split over processes give the losses and gradients of one process."""

from __future__ import annotations

import pytest

from tokenmix_core.modeling import HybridConfig, HybridForCausalLM
from tokenmix_core.testing.split_contract import TOLERANCE, check_models, core_models, refusals, traffic_of
from tokenmix_core.testing.split_inference import split_losses, split_prompts


@pytest.mark.parametrize("size", [2, 3, 4])
def test_losses_and_gradients_are_those_of_one_process(pool, size):
    configs = {name: HybridConfig(**fields) for name, fields in core_models().items()}
    errors = pool(size, check_models, HybridForCausalLM, configs if size == 3 else {"hybrid": configs["hybrid"]})
    worst = max(errors, key=lambda key: errors[key])
    assert errors[worst] <= TOLERANCE, f"{worst}: {errors[worst]}"


def test_layers_that_are_computed_again_know_the_split(pool):
    config = HybridConfig(**core_models()["hybrid"])
    errors = pool(2, check_models, HybridForCausalLM, {"hybrid": config}, True)
    assert max(errors.values()) <= TOLERANCE, errors


def test_bytes_are_counted_by_layer_and_operation_and_none_are_sent_for_documents_within_ranks(pool):
    config = HybridConfig(**core_models()["hybrid"])
    across, within = pool(2, traffic_of, HybridForCausalLM, config)
    assert not within
    layers = [["short_conv", "chunk_gated_delta_rule"], ["attention"], ["short_conv", "chunk_ssd"], ["attention"]]
    expected = {(i, name) for i, names in enumerate(layers) for name in names}
    assert set(across) == expected | {(i, f"{name}, backward") for i, name in expected}
    # float64: the last 3 tokens of q, k and v before the span, from rank 0 to rank 1
    assert across[0, "short_conv"] == 3 * (8 + 8 + 32) * 8


def test_what_cannot_be_split_is_refused_by_one_sentence_on_all_ranks(pool):
    config = HybridConfig(**core_models()["attention"])
    for sentences in zip(*pool(2, refusals, HybridForCausalLM, config), strict=True):
        assert len(set(sentences)) == 1
        assert sentences[0].count(". ") == 0


def test_losses_by_position_of_rows_of_an_odd_length_are_those_of_one_process(pool):
    config = HybridConfig(**core_models()["hybrid"])
    # logits enter the loss in float32
    assert pool(3, split_losses, HybridForCausalLM, config) <= 1e-6


def test_a_split_prompt_ends_in_the_states_of_one_process_on_every_rank(pool):
    config = HybridConfig(**core_models()["hybrid"])
    errors = pool(3, split_prompts, HybridForCausalLM, config)
    assert max(errors.values()) <= TOLERANCE, errors
