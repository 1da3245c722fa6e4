"""A batch with padding is one packed call in every layer, equals each row alone, and is read from the device once."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

import tokenmix_lte.held as held
import tokenmix_lte.nsa as nsa
from tokenmix_core.nn.state import Span
from tokenmix_core.testing.closeness import relative_error
from tokenmix_core.testing.models import left_padded
from tokenmix_lte.config import LteConfig
from tokenmix_lte.model import LteForCausalLM

LTE = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "window": 16, "cap": 5, "sinks": 2}
NSA = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "block": 4, "blocks": 4, "window": 5}


def build(mixer: str, options: dict) -> LteForCausalLM:
    torch.manual_seed(0)
    config = LteConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=3,
        max_position_embeddings=128,
        mixers=[mixer],
        mixer_options={mixer: options},
        initializer_range=0.3,
    )
    return LteForCausalLM(config).double().eval()


def count_reads(reads: list, monkeypatch) -> None:
    read = Span.__dict__["on_host"].fn

    def on_host(span):
        reads.append(1)
        return read(span)

    monkeypatch.setattr(Span, "on_host", type(Span.__dict__["on_host"])(on_host))


@torch.no_grad()
@pytest.mark.parametrize(
    ("mixer", "options"),
    [
        ("lte", LTE),
        ("lte", LTE | {"scorer": "causal"}),
        ("lte", LTE | {"scorer": "mlp", "window": 5}),
        ("lte", LTE | {"scorer": "none"}),
        ("lte", LTE | {"scorer": "uniform", "cap": 8, "sinks": 0}),
        ("nsa", NSA),
        ("nsa", NSA | {"block": 3, "blocks": 3, "window": 1}),
    ],
)
def test_a_padded_prompt_is_one_call_per_layer_and_equals_each_row(mixer, options, monkeypatch):
    model, calls, reads = build(mixer, options), [], []
    for module, name in ((held, "kept_attention"), (nsa, "block_attention")):
        whole = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *x, f=whole, **y: calls.append(1) or f(*x, **y))
    count_reads(reads, monkeypatch)
    lengths, steps = [70, 69, 41, 17, 12, 3, 1], 20
    # each row has different tokens: equal ones would have equal logits up to rounding, and either could be evicted
    generator = torch.Generator().manual_seed(1)
    ids = torch.stack([torch.randperm(128, generator=generator)[: 70 + steps] for _ in lengths])
    mask = left_padded([n + steps for n in lengths], 70 + steps)
    cache = model.make_cache()
    logits = [model(ids[:, :70], attention_mask=mask[:, :70], past_key_values=cache).logits]
    assert len(calls) == model.config.num_hidden_layers
    assert not reads
    # the state continues by steps and by several tokens at once
    ends = [70, *range(71, 80), 86, 87, 90]
    for start, end in pairwise(ends):
        calls.clear()
        part = model(ids[:, start:end], attention_mask=mask[:, :end], past_key_values=cache)
        logits.append(part.logits)
        # several tokens are one call per layer, although every sequence continues from another length
        assert end == start + 1 or len(calls) == model.config.num_hidden_layers
    for row, tokens, n in zip(torch.cat(logits, 1), ids, lengths, strict=True):
        alone = model(tokens[None, -n - steps :], use_cache=False).logits[0]
        assert relative_error(row[-n - steps :], alone) < 1e-11, n


@torch.no_grad()
@pytest.mark.parametrize(("mixer", "options"), [("lte", LTE), ("nsa", NSA)])
def test_a_continued_batch_reads_the_lengths_once_for_all_layers(mixer, options, monkeypatch):
    model, reads = build(mixer, options), []
    count_reads(reads, monkeypatch)
    ids, mask = torch.arange(60).view(3, 20), left_padded([20, 13, 4], 20)
    cache = model.make_cache()
    model(ids[:, :17], attention_mask=mask[:, :17], past_key_values=cache)
    model(ids[:, 17:], attention_mask=mask, past_key_values=cache)
    assert len(reads) == 1
