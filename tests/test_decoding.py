"""Test the benchmark of whole models' tokens: its rows, which rows a new one replaces, and drawn types."""

import json
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

SCRIPT = SimpleNamespace(
    **runpy.run_path(str(Path(__file__).parent.parent / "packages" / "core" / "benchmarks" / "decoding.py"))
)
CPU = torch.device("cpu")


def job(recipe="tokenmix_core.training.baselines:tiny", **changes):
    return SCRIPT.Job("a model", "1M", recipe, **{"after": 20, **changes})


def test_every_row_names_a_model_that_is_there():
    found = SCRIPT.jobs()
    assert len({tuple(getattr(one, name) for name in SCRIPT.KEY) for one in found}) == len(found)
    for one in {(one.recipe, str(one.options)): one for one in found if one.recipe != SCRIPT.EIGHT}.values():
        model = SCRIPT.model_of(one, torch.device("meta"))
        assert model.dtype == torch.bfloat16
        assert not model.training


def test_a_row_has_the_time_of_a_token_and_of_its_bytes():
    torch.manual_seed(0)
    one = job(batch=3, repeated=True)
    (row,) = SCRIPT.rows([one], CPU)
    assert row["step_ms"] > 0 < row["prompt_s"]
    alone = SCRIPT.measure(job(), SCRIPT.model_of(one, CPU))
    # three sequences hold three times the state, of the same weights
    assert row["held_mib"] == pytest.approx(3 * alone["held_mib"], rel=1e-3)
    assert row["floor_ms"] > alone["floor_ms"]


def test_types_are_drawn_at_their_share():
    from tokenmix_nats_l import layer

    scores = torch.randn(1, 4096, 8)
    before = layer.learned_types
    with SCRIPT.drawn(0.25):
        types = layer.learned_types(scores)
        assert types.softmax.shape == (1, 4096, 4)
        assert types.softmax.mean().item() == pytest.approx(0.25, abs=0.02)
        assert torch.equal(types.softmax + types.linear, torch.ones_like(types.linear))
    assert layer.learned_types is before
    few, most = (
        row["held_mib"]
        for row in SCRIPT.rows([job("tokenmix_nats_l.recipes:tiny", after=2000, share=x) for x in (0.1, 0.9)], CPU)
    )
    assert most > 1.2 * few


def test_the_converted_model_has_four_full_layers():
    sizes = dict(vocab_size=64, hidden_size=64, intermediate_size=32, num_attention_heads=2, num_key_value_heads=1)
    with CPU:
        model = SCRIPT._eight(**sizes)
    assert [i for i, window in enumerate(model.config.window) if window == "full"] == [0, 8, 16, 24]
    assert model.dtype == torch.bfloat16


def test_a_row_replaces_the_earlier_one_of_the_same_run(tmp_path):
    path = tmp_path / "tokens.json"
    rows = [{**dict.fromkeys(SCRIPT.KEY, "x"), "after": after, "step_ms": ms} for after, ms in ((1, 5), (2, 6), (1, 7))]
    for row in rows:
        SCRIPT.keep(row, path)
    assert [(row["after"], row["step_ms"]) for row in json.loads(path.read_text())] == [(1, 7), (2, 6)]


def test_rows_are_chosen_by_name(capsys, tmp_path):
    with pytest.raises(SystemExit):
        SCRIPT.main(["--only", "no such model"])
    assert "no row has no such model" in capsys.readouterr().err
