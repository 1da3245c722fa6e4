"""Test the measurement of varying lengths, with tiny sizes on a CPU."""

import json
import runpy
from pathlib import Path

import pytest

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "varying_lengths.py"))


def test_a_row_compares_both_kinds_of_steps(capsys):
    rows = SCRIPT["main"](["gated_delta_net-380m", "--smoke", "--device", "cpu"])
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == rows
    assert [row["form"] for row in rows] == list(SCRIPT["FORMS"])
    for row in rows:
        assert row["ratio"] == pytest.approx(row["varying_thousand_tokens_s"] / row["fixed_thousand_tokens_s"], rel=0.1)
        assert row["end"]["rss_mib"] > 0
        assert row["torch"]
    generated = rows[-1]
    assert [*generated["ms_by_batch"]] == ["1", "2", "3", "4"]
    assert generated["dtype"] == "float32"
    assert min(generated[name] for name in ("one_batch_thousand_tokens_s", "fixed_prompt_ms", "varying_prompt_ms")) > 0


def test_generation_of_both_kinds_takes_every_batch_size_equally_often(monkeypatch):
    import torch

    config, sizes = SCRIPT["config_of"]("tiny-transformer", 2), SCRIPT["SMOKE"]
    measurement = SCRIPT["Measurement"](config, sizes, torch.device("cpu"), torch.bfloat16)
    prompts = []

    def generate(ids, **options):
        prompts.append(tuple(ids.shape))
        return ids.repeat(1, 2)

    monkeypatch.setattr(measurement.model, "generate", generate)
    row = measurement.compare("generate")
    assert {x.dtype for x in measurement.model.parameters()} == {torch.bfloat16}
    # both kinds, two warm calls each rounded up to a turn, and a block of a turn each
    turns = [prompts[i : i + 3] for i in range(0, 12, 3)]
    assert [sorted(batch for batch, _ in turn) for turn in turns] == [[1, 2, 3]] * 4
    lengths = [{length for _, length in turn} for turn in turns]
    assert lengths[0] == lengths[2] == {16}
    assert len(lengths[1] | lengths[3]) > 1
    assert row["steps"] == 6


def test_lengths_and_boundaries_are_new_in_every_step():
    import torch

    measurement = SCRIPT["Measurement"](
        SCRIPT["config_of"]("tiny-transformer", 2), SCRIPT["SMOKE"], torch.device("cpu")
    )
    lengths = [measurement.length() for _ in range(20)]
    assert len(set(lengths)) == len(lengths)
    boundaries = measurement.boundaries(50, 7)
    assert boundaries[0] == 0
    assert boundaries[-1] == 50
    assert len(boundaries) == 8
    assert (boundaries.diff() > 0).all()


@pytest.mark.parametrize("layers", [2, 3, 0])
def test_fewer_layers_keep_every_kind(layers):
    whole, less = (SCRIPT["config_of"]("tiny", x) for x in (0, layers))
    assert set(less.mixers) == set(whole.mixers)
    assert less.num_hidden_layers == (layers or whole.num_hidden_layers)


def test_an_unknown_recipe_is_refused():
    with pytest.raises(ValueError, match="no recipe 'none'"):
        SCRIPT["config_of"]("none", 2)


def test_a_recipe_that_fails_leaves_the_others(capsys):
    rows = SCRIPT["main"](["none", "gated_delta_net-380m", "--smoke", "--device", "cpu", "--forms", "rows"])
    assert "no recipe" in rows[0]["error"]
    assert rows[1]["ratio"] > 0
