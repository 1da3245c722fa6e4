"""Test that the baselines have the sizes that their names state, equal sizes, and the counts of the equations."""

import pytest
import torch

from tokenmix_core.modeling import HybridConfig, HybridForCausalLM
from tokenmix_core.training.baselines import BASELINES, SIZES, baseline

STATED = {"130m": 130e6, "380m": 380e6, "810m": 810e6, "1.4b": 1410e6}


def model(kind, size):
    fields = baseline(kind, size).model
    with torch.device("meta"):
        return HybridForCausalLM(HybridConfig(**fields))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", BASELINES)
def test_counts_are_within_a_percent_of_what_the_name_states(kind, size):
    assert abs(model(kind, size).num_parameters() - STATED[size]) <= 0.01 * STATED[size]


def rest(width, layers, vocab, mlp):
    """Return the parameters outside of mixers: tied embeddings, MLPs, and the norms of the blocks and at the end."""
    return vocab * width + layers * 3 * width * mlp + (2 * layers + 1) * width


def delta(width, heads, key, value):
    projections = width * heads * (2 * key + 3 * value) + 2 * width * heads
    return projections + 4 * heads * (2 * key + value) + 2 * heads + value


def mamba(width, state=128, head=64):
    inner, heads = 2 * width, 2 * width // head
    mixed = inner + 2 * state
    return width * (inner + mixed + heads) + inner * width + (4 + 1) * mixed + 3 * heads + inner


def test_counts_follow_from_the_equations():
    d = 2048
    assert model("transformer", "1.4b").num_parameters() == rest(d, 24, 50257, 6144) + 24 * 4 * d * d
    assert model("mamba2", "1.4b").num_parameters() == rest(d, 24, 50257, 4672) + 24 * mamba(d)
    assert model("gated_delta_net", "1.4b").num_parameters() == rest(d, 24, 50257, 4736) + 24 * delta(d, 12, 128, 256)
