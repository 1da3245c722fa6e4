"""Evaluations of types, cache sizes, long contexts and speed, by core's suites and this package's."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tokenmix_core.data.tokenizer import byte_tokenizer
from tokenmix_core.evaluation.efficiency import BENCH_SUITES
from tokenmix_core.evaluation.options import EvalOptions
from tokenmix_core.evaluation.suites import SUITES as CORE_SUITES
from tokenmix_core.evaluation.suites import evaluate
from tokenmix_core.evaluation.text import BUILT_IN_TEXT, text_tokens
from tokenmix_core.modeling import HybridConfig, HybridForCausalLM
from tokenmix_nats_l import decoding
from tokenmix_nats_l.cli import main
from tokenmix_nats_l.config import NatsLConfig
from tokenmix_nats_l.evals import SUITES, nats_l_layers, softmax_shares, using_types
from tokenmix_nats_l.model import NatsLForCausalLM

SIZES = {"vocab_size": 264, "hidden_size": 32, "num_hidden_layers": 3, "intermediate_size": 32}
GDN = {"num_heads": 2, "head_dim": 8}
NATS_L = {"num_heads": 2, "head_dim": 8, "num_softmax_heads": 4}


def build(**options):
    torch.manual_seed(0)
    config = NatsLConfig(
        **SIZES,
        max_position_embeddings=128,
        initializer_range=0.2,
        mixers=["gated_delta_net", "nats_l", "nats_l"],
        mixer_options={"gated_delta_net": GDN, "nats_l": {**NATS_L, "rope": True, **options}},
    )
    return NatsLForCausalLM(config).eval()


def run(model, suite, **options):
    suites = {**CORE_SUITES, **SUITES}
    options = EvalOptions(progress=False, **{"batch_size": 1, **options})
    return suites[suite].run(model, byte_tokenizer(), options)


@pytest.mark.parametrize(("types", "share"), [("softmax", 1.0), ("linear", 0.0), ("alternate", 0.5)])
def test_forced_types_have_exact_shares(types, share):
    found = run(build(types=types), "chunk-types", lengths=(128, 256), limit=3)
    assert [(row["tokens"], row["layer"], row["sequences"]) for row in found["rows"]] == [
        (tokens, layer, 3) for tokens in (128, 256) for layer in (1, 2)
    ]
    for row in found["rows"]:
        assert row["mean"] == row["head 0"] == row["head 1"] == share
    assert [plot["heatmap"] for plot in found["plots"]] == [[[share, share]] * 2] * 2
    assert [plot["y_labels"] for plot in found["plots"]] == [["1", "2"]] * 2


@pytest.mark.parametrize(("types", "share"), [("softmax", 1.0), ("linear", 0.0), ("lls", 1 / 3), ("learned", None)])
def test_types_apply_to_one_command_and_are_in_its_results(types, share, tmp_path, capsys):
    model, forced = build(), build(types=types)
    forced.load_state_dict(model.state_dict(), strict=types == "learned")
    ids = torch.randint(0, 264, (1, 6 * 64))
    with torch.no_grad():
        before = model(ids).logits
        with using_types(model, SimpleNamespace(types=types)):
            assert torch.equal(model(ids).logits, forced(ids).logits)
        assert torch.equal(model(ids).logits, before)
    assert not hasattr(model, "evaluation_settings")
    model.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    flags = ["--suite", "chunk-types", "--lengths", "384", "--limit", "2", "--types", types, "--device", "cpu"]
    assert main(["eval", str(tmp_path), *flags]) == 0
    result = json.loads((tmp_path / "evaluation" / "chunk-types.json").read_text())
    assert result["settings"]["types"] == types
    assert all(row["types"] == types for row in result["rows"])
    assert share is None or [row["mean"] for row in result["rows"]] == pytest.approx([share, share])
    capsys.readouterr()
    assert main(["eval", str(tmp_path), *flags[:-3], "lxs"]) == 2
    assert "types must be one of 'learned', 'softmax', 'linear', 'alternate', or a pattern" in capsys.readouterr().err


def test_shares_equal_those_of_the_chosen_types():
    model, seen = build(), {}
    for i, layer in nats_l_layers(model).items():
        layer.register_forward_pre_hook(
            lambda layer, args, kwargs, i=i: seen.setdefault(i, []).append(layer.types_of(args[0], None).softmax),
            with_kwargs=True,
        )
    ids = torch.randint(0, 264, (5, 200), generator=torch.Generator().manual_seed(0))
    shares = softmax_shares(model, ids, batch_size=2, progress=False)
    expected = np.stack([torch.cat(seen[i]).double().mean((0, 1)).numpy() for i in (1, 2)])
    np.testing.assert_allclose(shares, expected, rtol=1e-6)
    assert 0 < shares.mean() < 1


def test_each_file_of_a_folder_is_a_text(tmp_path):
    for name, sentence in (("a.txt", "one two three "), ("b.txt", "def f(x): return x\n")):
        (tmp_path / name).write_text(sentence * 40)
    found = evaluate(
        build(), byte_tokenizer(), ["chunk-types"], EvalOptions(text=str(tmp_path), lengths=(128,), progress=False),
        out=tmp_path / "out", suites=SUITES,
    )["chunk-types"]  # fmt: skip
    assert [row["text"] for row in found["rows"]] == ["a.txt", "a.txt", "b.txt", "b.txt"]
    assert len(list((tmp_path / "out").glob("chunk-types*.png"))) == 2


def test_a_file_that_is_too_short_is_named_and_costs_no_other(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("one two three " * 40)
    (tmp_path / "b.txt").write_text("short")
    (tmp_path / "c.txt").write_text("def f(x): return x\n" * 40)
    options = EvalOptions(text=str(tmp_path), lengths=(128,), progress=False)
    with pytest.raises(
        ValueError, match=r"parts of evaluations failed \(chunk-types, b.txt at 128 tokens: .*too short"
    ):
        evaluate(build(), byte_tokenizer(), ["chunk-types"], options, out=tmp_path / "out", suites=SUITES)
    assert "chunk-types, b.txt at 128 tokens failed: " in capsys.readouterr().err
    rows = json.loads((tmp_path / "out" / "chunk-types.json").read_text())["rows"]
    assert [row["text"] for row in rows] == ["a.txt", "a.txt", "c.txt", "c.txt"]


@pytest.mark.parametrize(("types", "chunks"), [("softmax", 1), ("linear", 0), ("alternate", None)])
def test_retained_tokens_are_those_of_complete_softmax_chunks(types, chunks):
    model = build(types=types)
    rows = run(model, "held", lengths=(63, 64, 130, 256))["rows"]
    for row in rows:
        whole = row["tokens"] // 64
        expected = 64 * (whole // 2 if chunks is None else chunks * whole)
        if row["layer"] != "all":
            assert [row[f"head {h}"] for h in range(4)] == [expected] * 4
            assert [row["layer"] for row in rows[:3]] == ["all", "1", "2"]
            continue
        assert row["least"] <= row["bytes in use"] <= row["most"]
        # two layers of four heads: float32 keys (4 channels) and values (8 channels), and the lengths
        lists = 2 * 4 * (expected * (4 + 4 * 2) * 4 + 4 * bool(whole))
        assert row["bytes in use"] == row["least"] + lists
        assert row["bytes in use"] <= row["bytes"]


def test_bytes_allocated_follow_the_tokens_of_each_head(monkeypatch):
    # the host reads the pages in use before it allocates memory, as in calls of many chunks
    monkeypatch.setattr(decoding, "BLOCK", 0)
    model, lengths = build(), (640,)
    rows = run(model, "held", lengths=lengths)["rows"]
    for row in rows[1:]:
        longest = max(row[f"head {h}"] for h in range(4))
        assert longest > min(row[f"head {h}"] for h in range(4))
        token = (4 + 4 * 2) * 4
        rectangle = sum(longest - row[f"head {h}"] for h in range(4)) * token
        # spare: a tenth, a page for each head, one for chunks that no head retains, and the table of pages
        spare = row["bytes"] - row["bytes in use"]
        assert 0 <= spare <= 0.1 * row["bytes in use"] + 5 * 64 * token + 4 * 96 * 4
        assert rectangle > 0
    assert rows[0]["bytes"] > sum(row["bytes"] for row in rows[1:])


def test_bytes_in_use_lie_within_the_bounds_for_learned_types():
    rows = [row for row in run(build(), "held", lengths=(64, 640))["rows"] if row["layer"] == "all"]
    assert rows[0]["bytes in use"] < rows[1]["bytes in use"] < rows[1]["most"]
    assert rows[0]["least"] == rows[1]["least"]


def test_loss_by_position_exceeds_the_training_length():
    model = build()
    found = run(model, "perplexity-by-position", lengths=(4 * model.config.max_position_embeddings,), limit=2)
    curves = [series for plot in found["plots"] for series in plot["series"].values()]
    assert max(x[-1] for x, _ in curves) > 3.5 * model.config.max_position_embeddings
    assert all(np.isfinite(y).all() for _, y in curves)


def test_speed_and_bytes_by_length_are_measured():
    result = run(build(), "efficiency", lengths=(64, 200), limit=1)
    rows = result["rows"]
    # the prompt is a text, because the cost depends on the types of its chunks
    assert result["settings"]["prompt"] == BUILT_IN_TEXT
    ids = torch.tensor(text_tokens(None, byte_tokenizer(), 200), dtype=torch.long).unsqueeze(0)
    for row in rows:
        share = softmax_shares(build(), ids[:, : row["context"]], progress=False).mean()
        assert row["softmax share"] == pytest.approx(share)
    training = BENCH_SUITES["training"].run(build(), byte_tokenizer(), EvalOptions(lengths=(200,), progress=False))
    assert training["rows"][0]["softmax share"] == pytest.approx(share)
    assert [row["context"] for row in rows] == [64, 200]
    assert all(row["decode ms/token"] > 0 and row["prefill ms"] > 0 for row in rows)
    model = build()
    for row in rows:
        assert row["cache bytes"] >= model.state_bounds(row["context"], 1)[0]
        assert row["cache bytes, decoded"] >= row["cache bytes"]


@pytest.mark.parametrize("suite", ["chunk-types", "held"])
def test_invalid_suites_and_texts_raise(suite, tmp_path):
    plain = HybridForCausalLM(HybridConfig(**SIZES, mixers=["gated_delta_net"], mixer_options={"gated_delta_net": GDN}))
    with pytest.raises(ValueError, match="the model has no NAtS-L layer; its mixers are gated_delta_net"):
        run(plain, suite, lengths=(128,))
    model = build()
    with pytest.raises(ValueError, match=f"suite {suite} has no task 'heads'"):
        run(model, suite, tasks=("heads",))
    (tmp_path / "short.txt").write_text("too short")
    with pytest.raises(ValueError, match="too short for a"):
        run(model, suite, text=str(tmp_path / "short.txt"), lengths=(128,))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="empty"):
        run(model, suite, text=str(tmp_path / "empty"), lengths=(128,))
    with pytest.raises(ValueError, match="missing"):
        run(model, suite, text=str(tmp_path / "missing"), lengths=(128,))


def test_suite_names_differ_from_core():
    assert not set(SUITES) & set(CORE_SUITES)
    assert all(suite.summary for suite in SUITES.values())


def test_command_lists_recipes_and_suites(capsys):
    assert main(["info"]) == 0
    out = capsys.readouterr().out
    for name in ("nats-l-hybrid-800m", "nats-l-hybrid-380m-no-decay", "gdn-hybrid-380m", "chunk-types", "held"):
        assert name in out
    assert main(["info", "tiny", "--lengths", "1000"]) == 0
    out = capsys.readouterr().out
    assert "tokenmix_nats_l" in out
    # a range, because the cache size depends on the chunks' types
    assert re.search(r"cache at 1,000 +[\d,]+ to [\d,]+ bytes", out)
