"""Test tokens appended in training: how many, and to which calls."""

import pytest
import torch

from tokenmix_core.modeling import HybridConfig, HybridForCausalLM, lengths
from tokenmix_core.nn.attention import Attention


@pytest.fixture
def model(monkeypatch):
    monkeypatch.setattr(lengths, "on_gpu", lambda x: True)
    torch.manual_seed(0)
    config = HybridConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, mixers=["attention"],
        mixer_options={"attention": {"num_heads": 2}},
    )  # fmt: skip
    return HybridForCausalLM(config).train()


@pytest.fixture
def seen(model, monkeypatch) -> list[int]:
    """Return the list of the tokens of each call of the backbone."""
    found, forward = [], model.model.forward

    def noting(input_ids, *args, **kwargs):
        found.append(input_ids.shape[1])
        return forward(input_ids, *args, **kwargs)

    monkeypatch.setitem(model.model.__dict__, "forward", noting)
    return found


def test_lengths_are_rounded_and_powers_of_two_stay():
    assert {lengths.rounded_length(n) for n in range(7000, 9401)} == {7168, 7424, 7680, 7936, 8192, 8704, 9216, 9728}
    assert all(lengths.rounded_length(1 << n) == 1 << n for n in range(4, 20))
    assert all(n <= lengths.rounded_length(n) <= n + n // 16 for n in range(256, 5000))
    assert lengths.rounded_length(1) == 16


def test_training_rows_are_padded(model, seen):
    ids = torch.arange(20).unsqueeze(0)
    model(ids, labels=ids)
    model(ids, labels=ids, cu_seqlens=torch.tensor([0, 3, 20], dtype=torch.int32))
    assert seen == [32, 32]


def test_calls_with_visible_tokens_are_not_padded(model, seen):
    ids = torch.arange(20).unsqueeze(0)
    model(ids)
    model(ids, labels=ids, output_logits=True)
    model(ids, labels=ids, output_hidden_states=True)
    model(ids, labels=ids, attention_mask=torch.ones_like(ids))
    model(ids, labels=ids, position_ids=ids)
    with torch.no_grad():
        model(ids, labels=ids)
    model.eval()
    model(ids, labels=ids)
    model.train()
    with model.model.norm.register_forward_hook(lambda *x: None):
        model(ids, labels=ids)
    assert set(seen) == {20}


def test_unknown_mixers_and_modules_are_not_padded(model, seen):
    ids = torch.arange(20).unsqueeze(0)
    mixer = model.model.layers[0].mixer
    mixer.__class__ = type("Other", (Attention,), {"__module__": "tokenmix_core.other"})
    model(ids, labels=ids)
    mixer.__class__ = Attention
    model.model.norm.__class__ = type("Other", (type(model.model.norm),), {"__module__": "__main__"})
    model(ids, labels=ids)
    assert seen == [20, 20]


def test_invalid_calls_still_raise(model):
    ids = torch.arange(20).unsqueeze(0)
    with pytest.raises(ValueError, match="labels must have shape"):
        model(ids, labels=ids[:, :5])
    with pytest.raises(ValueError, match="input_ids must have shape"):
        model(ids[0], labels=ids[0])
