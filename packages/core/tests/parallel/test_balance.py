"""Test which layout balances a model, and how heads are divided among exchanges."""

from __future__ import annotations

import pytest
import torch

from support.split_contract import core_models
from tokenmix_core.modeling import HybridConfig, HybridForCausalLM
from tokenmix_core.parallel import balanced_layout
from tokenmix_core.parallel.overlap import GROUP_BYTES, HeadGroup, head_groups

MODELS = core_models()
MIXERS = ["gated_delta_net", "window"]
MODELS["windows"] = {
    **MODELS["hybrid"],
    "mixers": MIXERS,
    "num_hidden_layers": 2,
    "mixer_options": {name: MODELS["hybrid"]["mixer_options"][name] for name in MIXERS},
}


@pytest.mark.parametrize(
    ("name", "layout"),
    [("attention", "zigzag"), ("hybrid", "zigzag"), ("gated_delta_net", "contiguous"), ("windows", "contiguous")],
)
def test_models_that_attend_to_whole_rows_take_zigzag(name, layout):
    assert balanced_layout(HybridForCausalLM(HybridConfig(**MODELS[name]))) == layout


@pytest.mark.parametrize(
    ("heads", "sent", "sizes"),
    [
        (4, 0, [4]),
        (4, 2 * GROUP_BYTES - 1, [4]),
        (4, 2 * GROUP_BYTES, [2, 2]),
        (5, 3 * GROUP_BYTES, [1, 2, 2]),
        (2, 100 * GROUP_BYTES, [1, 1]),
        (16, 100 * GROUP_BYTES, [4] * 4),
    ],
)
def test_heads_are_divided_by_the_bytes_that_a_rank_sends(heads, sent, sizes):
    groups = head_groups(heads, sent)
    assert [group.stop - group.first for group in groups] == sizes
    x = torch.arange(6 * heads).view(1, 2, heads, 3)
    assert torch.equal(torch.cat([group.of(x) for group in groups], 2), x)


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="3 heads are no multiple of 2"):
        HeadGroup(0, 1, 2).of(torch.zeros(1, 5, 3, 4))
