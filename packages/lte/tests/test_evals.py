"""Evaluation suites report retained shares and costs, and the command line runs them on a trained model."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from tokenmix_core.data.tokenizer import byte_tokenizer
from tokenmix_core.evaluation.options import EvalOptions
from tokenmix_core.evaluation.report import write_result
from tokenmix_core.modeling import HybridConfig, HybridForCausalLM
from tokenmix_lte import latency, tables
from tokenmix_lte.cli import main
from tokenmix_lte.evals import retained_shares, retention_suite, scorer_suite
from tokenmix_lte.limits import using_retention
from tokenmix_lte.model import LteConfig, LteForCausalLM

FIELDS = {"vocab_size": 264, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48}


@pytest.fixture(scope="module")
def model() -> LteForCausalLM:
    torch.manual_seed(0)
    options = {"num_heads": 4, "num_kv_heads": 2, "window": 16, "cap": 6, "sinks": 2}
    return LteForCausalLM(LteConfig(**FIELDS, mixer_options={"lte": options}, initializer_range=0.2)).eval()


def test_held_shares_agree_with_the_state_after_the_same_tokens(model):
    ids = torch.randint(0, 264, (5, 50))
    shares, scored = retained_shares(model, ids, batch_size=2, progress=False)
    cache = model.make_cache()
    with torch.no_grad():
        model(ids, past_key_values=cache)
    for share, layer in zip(shares, cache.layers, strict=True):
        held = (layer.kv.lengths - 16).double().mean(0) / (50 - 16)
        torch.testing.assert_close(torch.from_numpy(share), held, rtol=1e-5, atol=1e-6)
    # the cap limits some heads
    assert shares.max() <= 6 / (50 - 16) + 1e-6 < scored.max()
    # without the cap the state holds all keys that the scorer retains
    with using_retention(model, SimpleNamespace(cap="none", window=None)):
        uncapped, same = retained_shares(model, ids, batch_size=2, progress=False)
        cache = model.make_cache()
        with torch.no_grad():
            model(ids, past_key_values=cache)
    assert (uncapped == same).all()
    # compare the first layer only: the inputs of later layers depend on the cap
    assert (same[0] == scored[0]).all()
    for share, layer in zip(uncapped, cache.layers, strict=True):
        torch.testing.assert_close(
            torch.from_numpy(share), (layer.kv.lengths - 16).double().mean(0) / 34, rtol=1e-5, atol=1e-6
        )
    assert (retained_shares(model, ids, progress=False)[0] == shares).all()


def test_another_cap_and_window_apply_to_evaluation_alone(model):
    ids = torch.randint(0, 264, (2, 50))
    config = LteConfig(**FIELDS, mixer_options={"lte": model.config.mixer_options["lte"] | {"cap": 3, "window": 20}})
    other = LteForCausalLM(config).eval()
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        before = model(ids).logits
        with using_retention(model, SimpleNamespace(cap="3", window=20)):
            assert torch.equal(model(ids).logits, other(ids).logits)
            greedy = {"max_new_tokens": 30, "do_sample": False, "pad_token_id": 0}
            assert torch.equal(model.generate(ids, **greedy), other.generate(ids, **greedy))
        assert torch.equal(model(ids).logits, before)
    for cap, window, words in (("1", None, "cap must be"), (None, 3, "window must be at least"), ("x", None, "--cap")):
        with pytest.raises(ValueError, match=words), using_retention(model, SimpleNamespace(cap=cap, window=window)):
            pass


def test_the_heat_map_has_a_row_for_each_layer_and_a_plot_for_each_length(model, tmp_path):
    result = retention_suite(model, byte_tokenizer(), EvalOptions(lengths=(64, 40), limit=3, progress=False))
    found = [(row["tokens"], row["retained"], row["layer"]) for row in result["rows"]]
    assert found == [(n, kind, layer) for n in (40, 64) for kind in ("held", "scorer") for layer in (0, 1)]
    for i, plot in enumerate(result["plots"]):
        rows = result["rows"][2 * i : 2 * i + 2]
        assert plot["heatmap"] == [[row["head 0"], row["head 1"]] for row in rows]
        assert plot["y_labels"] == ["0", "1"]
    names = {path.name for path in write_result(result, tmp_path)}
    assert {"retention-1.png", "retention-4.png"} <= names


def test_the_scorer_s_share_is_counted(model):
    (row,) = scorer_suite(model, byte_tokenizer(), EvalOptions(lengths=(64,), progress=False))["rows"]
    # 16, 8, 4 and 2 channels, and three taps
    head = 3 * (16 * 8 + 8 * 4 + 4 * 2) + 8 + 4 + 2 + 2 + 1
    assert row["scorers' parameters"] == 2 * 2 * head
    assert row["share of parameters"] == 4 * head / model.num_parameters()
    assert row["scorers' operations a token"] == 2 * 4 * head
    assert 0 < row["share of operations"] < row["share of the layers' operations"] < 1


def test_the_paper_s_scorers_have_the_share_of_parameters_it_states():
    from tokenmix_lte.recipes import RECIPES

    with torch.device("meta"):
        model = LteForCausalLM(RECIPES["lalte-0.4b"]().model_config())
    (row,) = scorer_suite(model, byte_tokenizer(), EvalOptions(progress=False))["rows"]
    assert row["share of parameters"] == pytest.approx(0.0173, abs=1e-4)


def test_models_without_such_layers_and_short_texts_are_refused(model):
    other = HybridForCausalLM(HybridConfig(**FIELDS, mixer_options={"attention": {"num_heads": 2}}))
    with pytest.raises(ValueError, match="LTE layers"):
        retention_suite(other, byte_tokenizer(), EvalOptions(progress=False))
    with pytest.raises(ValueError, match="above the window of 16"):
        retention_suite(model, byte_tokenizer(), EvalOptions(lengths=(16,), progress=False))
    partial = retention_suite(model, byte_tokenizer(), EvalOptions(lengths=(16, 40), limit=2, progress=False))
    assert {row["tokens"] for row in partial["rows"]} == {40}
    assert list(partial["failed"]) == ["16 tokens"]


def test_passages_are_truncated_at_4096_tokens(model, monkeypatch):
    asked = []

    def recall(model, tokenizer, options):
        asked.append(options.max_length)
        return {"suite": "recall", "settings": {}, "rows": [], "plots": []}

    monkeypatch.setattr(tables, "recall_suite", recall)
    assert tables.evaporate_suite(model, None, EvalOptions())["suite"] == "evaporate"
    tables.evaporate_suite(model, None, EvalOptions(max_length=1000))
    assert asked == [4096, 1000]


def test_latency_times_the_layers_with_a_kv_cache_and_their_scorers(monkeypatch):
    monkeypatch.setattr(latency, "STEPS", 70)
    options = {
        "lte": {"num_heads": 2, "window": 100, "cap": 6, "sinks": 2},
        "nsa": {"num_heads": 2, "num_kv_heads": 1, "head_dim": 16, "block": 4, "blocks": 3, "window": 8},
        "gated_delta_net": {"num_heads": 1, "head_dim": 16},
    }
    torch.manual_seed(0)
    sizes = FIELDS | {"num_hidden_layers": 3}
    hybrid = LteForCausalLM(LteConfig(**sizes, mixers=list(options), mixer_options=options)).eval()
    asked = EvalOptions(lengths=(24, 16), batch_size=2, limit=3, progress=False)
    result = latency.latency_suite(hybrid, byte_tokenizer(), asked)
    assert [(row["phase"], row["context"]) for row in result["rows"]] == [
        ("prefill", 16),
        ("prefill", 24),
        ("decoding", 24),
    ]
    # 70 steps run the scorer at least once
    assert all(row["ms"] > row["scoring ms"] > 0 for row in result["rows"])
    monkeypatch.setattr(latency, "decode_latency", lambda *_, **__: 1 / 0)
    partial = latency.latency_suite(hybrid, byte_tokenizer(), asked)
    assert [row["context"] for row in partial["rows"]] == [16, 24]
    assert list(partial["failed"]) == ["decoding after 24 tokens"]
    # the suite has removed its hooks
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in hybrid.modules())
    linear = HybridForCausalLM(
        HybridConfig(**FIELDS, mixers=["gated_delta_net"], mixer_options={"gated_delta_net": {"num_heads": 1}})
    )
    with pytest.raises(ValueError, match="layers that have a KV cache"):
        latency.latency_suite(linear, byte_tokenizer(), asked)


def test_a_decoding_row_covers_the_tokens_after_its_context(monkeypatch):
    position, marks = 0, []

    class Model:
        def __call__(self, input_ids, **_):
            nonlocal position
            position += input_ids.shape[1]
            return SimpleNamespace(cache=None)

    clock = SimpleNamespace(milliseconds=lambda: marks.append(position) or 0.0)
    monkeypatch.setattr(latency, "clocks", lambda model: nullcontext((clock, clock)))
    for context, steps in ((24, 16), (2, 16)):
        position = 0
        marks.clear()
        row = latency.decode_latency(Model(), torch.zeros(1, context + steps, dtype=torch.long), steps=steps)
        # the clocks restart where the context ends
        assert marks == [context, context, context + steps, context + steps]
        assert row["context"] == context


@pytest.mark.slow
def test_the_tiny_recipe_trains_evaluates_and_generates(tmp_path, capsys):
    flags = "--seq_len 128 --batch_tokens 256 --micro_batch_tokens 256 --total_tokens 1024 --warmup_tokens 256"
    flags += " --evaluation_lengths 128 --evaluation_limit 2 --model.hidden_size 32 --model.num_hidden_layers 2"
    assert main(["train", "tiny", "--out", str(tmp_path / "run"), *flags.split()]) == 0
    assert any((tmp_path / "run").rglob("retention*.json"))
    assert main(["generate", str(tmp_path / "run"), "--prompt", "def ", "--max-new-tokens", "100"]) == 0
    assert "def " in capsys.readouterr().out
