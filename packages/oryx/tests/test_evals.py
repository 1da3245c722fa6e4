"""Test the paper's measurements: the inputs that they give to the model, and how they evaluate its answers."""

import itertools
from functools import partial

import numpy as np
import pytest
import torch

from tokenmix_core.data.tokenizer import byte_tokenizer
from tokenmix_core.evaluation.options import EvalOptions
from tokenmix_core.evaluation.recall import niah_examples
from tokenmix_core.evaluation.suites import SUITES as CORE_SUITES
from tokenmix_core.evaluation.suites import evaluate
from tokenmix_oryx import evals, switch_evals
from tokenmix_oryx.config import OryxConfig
from tokenmix_oryx.model import OryxForCausalLM
from tokenmix_oryx.modes import MODES

PAIRS = ["linear → linear", "attention → linear", "linear → attention", "attention → attention"]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    sizes = {"vocab_size": 264, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 32}
    sizes["mixer_options"] = {"oryx": {"head_dim": 16}}
    return OryxForCausalLM(OryxConfig(**sizes, mode_chunk_size=16, initializer_range=0.1)).eval()


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(" ".join(f"Sentence {i} says {(i * i) % 97}." for i in range(1000)))
    return str(path)


@pytest.fixture
def calls(model, monkeypatch):
    """Return a list to which each call of the backbone appends its mode: one, or rows with True for attention."""
    seen = []
    prepare = type(model.model).prepare_mixer_inputs

    def watch(self, inputs, span, cu_seqlens, cache):
        out = prepare(self, inputs, span, cu_seqlens, cache)
        modes = out["mode"]
        seen.append(modes.uniform or span.unpack(modes.attention).tolist())
        return out

    monkeypatch.setattr(type(model.model), "prepare_mixer_inputs", watch)
    return seen


def test_schedules_switch_once_often_and_within_chunks():
    plots = switch_evals.switch_schedules(2048, 128)
    assert plots["one switch"]["linear → attention at 1024"] == [(0, "linear"), (1024, "attention")]
    assert len(plots["one switch"]) == 6
    several = plots["several switches"]["attention first, every 512"]
    assert several == [(0, "attention"), (512, "linear"), (1024, "attention"), (1536, "linear")]
    for schedule in plots["unaligned switches"].values():
        assert len(schedule) > 3
        assert all(start % 128 for start, _ in schedule[1:])
        assert all(a[1] != b[1] for a, b in itertools.pairwise(schedule))


def test_excess_is_measured_after_the_switch():
    alone = {"linear": np.zeros((3, 400)), "attention": np.full((3, 400), 5.0)}
    losses = np.concatenate([np.zeros((3, 100)), 5.0 + 2.0 * (np.arange(300) < 16)[None].repeat(3, 0)], 1)
    found = switch_evals._excess(losses, alone, [(0, "linear"), (100, "attention")])
    assert found["excess, 0-16 tokens after"] == 2.0
    assert found["excess, 16-64 tokens after"] == found["excess, 64-128 tokens after"] == 0.0
    assert found["± 0-16"] == 0.0
    alone = {mode: x[:1] for mode, x in alone.items()}
    one = switch_evals._excess(losses[:1], alone, [(0, "linear"), (100, "attention")])
    assert (one["excess, 0-16 tokens after"], one["± 0-16"]) == (2.0, None), "one sequence says nothing of the error"


@pytest.mark.parametrize("chunk_size", [1, 16, 128])
def test_least_length_for_all_switches(chunk_size):
    least = chunk_size + chunk_size // 3 + 3
    for curves in switch_evals.switch_schedules(least, chunk_size).values():
        assert curves
        assert all(len(schedule) > 1 and schedule[-1][0] < least - 1 for schedule in curves.values())
    with pytest.raises(ValueError, match=f"need more than {least - 1} tokens, got {least - 1}"):
        switch_evals.switch_schedules(least - 1, chunk_size)


def test_perplexity_around_switches_equals_that_of_the_schedule(model, text, tmp_path):
    options = EvalOptions(limit=3, lengths=(128,), text=text, progress=False)
    result = evaluate(model, byte_tokenizer(), ["switch-perplexity"], options, out=tmp_path, suites=evals.SUITES)
    result = result["switch-perplexity"]
    assert len(list(tmp_path.glob("switch-perplexity*.png"))) == 4
    rows = {row["modes"]: row for row in result["rows"]}
    curves = result["plots"][0]["series"]
    assert set(curves) < set(rows)
    at = np.array(curves["attention alone"][1]), np.array(curves["linear → attention at 64"][1])
    linear = np.array(curves["linear alone"][1])
    # the token before position t predicts it, and smoothing mixes neighbouring positions
    assert np.allclose(at[1][:62], linear[:62])
    assert not np.allclose(at[1][66:], linear[66:])
    assert "excess, 0-16 tokens after" in rows["linear → attention at 64"]
    assert "excess, 0-16 tokens after" not in rows["linear alone"]
    first = dict(zip(rows, result["samples"], strict=True))["linear → attention at 64"]
    parts = [rows["linear → attention at 64"][f"excess, {a}-{b} tokens after"] for a, b in ((0, 16), (16, 64))]
    # 63 positions follow the switch
    assert np.mean(first) == pytest.approx(np.average(parts, weights=(16, 47)), abs=1e-6)
    excess = result["plots"][1]["series"]
    assert set(excess) == {"attention → linear", "linear → attention"}
    # the last switch, at 96 of 127 positions, leaves 31: the curves end with the shortest one
    assert [len(y) for _, y in excess.values()] == [31, 31]


def test_isolated_suites_run_in_each_mode(model, text, calls):
    options = EvalOptions(limit=2, lengths=(64,), tasks=("mqar-64-4",), vocab_size=64, progress=False)
    result = evals.SUITES["isolated-mqar"].run(model, byte_tokenizer(), options)
    assert [row["modes"] for row in result["rows"]] == ["linear", "attention"]
    assert calls == ["linear", "attention"]
    assert model.model.default_mode == "attention"


@pytest.mark.parametrize("suite", ["cross-mode-mqar", "cross-mode-niah", "isolated-mqar", "switch-perplexity"])
def test_a_failing_mode_costs_no_other_one(suite, model, text, monkeypatch):
    modes, begun = model.modes, []

    def third_fails(*schedule):
        begun.append(schedule)
        if len(begun) == 3 or (suite == "isolated-mqar" and len(begun) == 2):
            raise RuntimeError("no memory")
        return modes(*schedule)

    monkeypatch.setattr(model, "modes", third_fails)
    options = {
        "cross-mode-niah": EvalOptions(limit=1, lengths=(600,), tasks=("s-niah-1",), text=text, progress=False),
        "switch-perplexity": EvalOptions(limit=1, lengths=(64,), tasks=("one switch",), text=text, progress=False),
    }.get(suite, EvalOptions(limit=1, lengths=(64,), tasks=("mqar-64-4",), vocab_size=64, progress=False))
    result = evals.SUITES[suite].run(model, byte_tokenizer(), options)
    assert len(result["failed"]) == 1
    assert all(str(error) == "no memory" for error in result["failed"].values())
    assert result["rows"]


def test_all_pair_counts_of_the_vocabulary_are_crossed(model):
    options = EvalOptions(limit=1, lengths=(64,), vocab_size=20, progress=False)
    rows = evals.SUITES["cross-mode-mqar"].run(model, byte_tokenizer(), options)["rows"]
    # 16 pairs would fit into 64 tokens, but a vocabulary of 20 has only nine keys
    assert [row["pairs"] for row in rows] == [4, 8] * 4


def test_recall_crosses_modes_between_pairs_and_queries(model, calls):
    options = EvalOptions(limit=2, lengths=(64,), tasks=("mqar-64-8",), vocab_size=64, progress=False)
    result = evals.SUITES["cross-mode-mqar"].run(model, byte_tokenizer(), options)
    assert [row["modes"] for row in result["rows"]] == PAIRS
    assert [len(values) for values in result["samples"]] == [2] * 4
    assert calls[0] == "linear"
    assert calls[3] == "attention"
    assert calls[2] == [[t >= 16 for t in range(64)]] * 2


def test_needles_cross_modes_between_haystack_and_question(model, text, calls):
    tokenizer = byte_tokenizer()
    options = EvalOptions(limit=2, lengths=(600,), tasks=("s-niah-1",), text=text, progress=False)
    result = evals.SUITES["cross-mode-niah"].run(model, tokenizer, options)
    assert [row["modes"] for row in result["rows"]] == PAIRS
    assert [len(values) for values in result["samples"]] == [2] * 4
    examples = niah_examples("s-niah-1", tokenizer, 600, 2)
    lengths = [[len(part) for part in (e.context, e.question)] for e in examples]
    longest = max(map(sum, lengths))
    # prompts of the third pair of modes: attention in the last columns of each row, which have its question
    prompt = next(c for c in calls if isinstance(c, list) and len(c) == 2 and c[0][-1])
    assert [sum(row) for row in prompt] == [question for _, question in lengths]
    assert [len(row) for row in prompt] == [longest] * 2


def test_cloze_recall_splits_prompts_at_975_permille(model, calls, monkeypatch):
    def stub(model, tokenizer, options):
        ids = torch.randint(3, 200, (2, 80))
        mask = torch.ones(2, 80, dtype=torch.long)
        mask[1, :40] = 0
        model.generate(ids, attention_mask=mask, max_new_tokens=2, do_sample=False, eos_token_id=None, pad_token_id=0)
        return {"suite": "recall", "settings": {}, "rows": [{"task": "stub", "value": 0.0}], "plots": []}

    monkeypatch.setattr(evals, "recall_suite", stub)
    result = evals.SUITES["cross-mode-recall"].run(model, byte_tokenizer(), EvalOptions())
    assert [row["modes"] for row in result["rows"]] == PAIRS
    assert calls[2 * 2 : 2 * 3] == [[[False] * 78 + [True] * 2, [False] * 79 + [True]], "attention"]
    assert calls[2:4] == [[[True] * 78 + [False] * 2, [False] * 40 + [True] * 39 + [False]], "linear"]


CHOICES = """
import datasets

def rows(**_):
    texts = enumerate(("x", "yy", "the end", "so", "a", "bc", "it was", "no"))
    rows = [{"text": t, "choices": ["a", "a longer answer", "7!"], "gold": (i > 4) + (i > 6)} for i, t in texts]
    return {"test": datasets.Dataset.from_list(rows)}
"""
TASK = """
task: NAME
custom_dataset: !function local.rows
output_type: multiple_choice
test_split: test
doc_to_text: "{{text}}"
doc_to_choice: "{{choices}}"
doc_to_target: gold
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
  - {metric: acc_norm, aggregation: mean, higher_is_better: true}
"""


def test_average_is_over_the_papers_seven_columns(model, tmp_path, monkeypatch):
    """OBQA counts by accuracy, HellaSwag and ARC-c by normalised accuracy, as the headers of Tables 1 and 9 say."""
    pytest.importorskip("lm_eval")
    (tmp_path / "local.py").write_text(CHOICES)
    columns = ["lambada_openai", "hellaswag", "piqa", "arc_easy", "arc_challenge", "winogrande", "openbookqa"]
    for name in columns:
        (tmp_path / f"{name}.yaml").write_text(TASK.replace("NAME", name))
    monkeypatch.setattr(evals, "run_tasks", partial(evals.run_tasks, include=[tmp_path], builtin=False))
    result = evals.SUITES["isolated-language-modeling"].run(model, byte_tokenizer(), EvalOptions(progress=False))
    for mode in ("linear", "attention"):
        values = {(r["task"], r["metric"]): r["value"] for r in result["rows"] if r["modes"] == mode}
        counted = [values[name, "acc_norm" if name in ("hellaswag", "arc_challenge") else "acc"] for name in columns]
        assert values["average", "7 tasks"] == pytest.approx(sum(counted) / 7)
        assert values["openbookqa", "acc"] != values["openbookqa", "acc_norm"]


@pytest.fixture
def ruler(monkeypatch):
    pytest.importorskip("lm_eval")
    pytest.importorskip("wonderwords")
    from pathlib import Path

    import lm_eval.tasks

    folder = Path(lm_eval.tasks.__file__).parent / "ruler"
    monkeypatch.setattr("nltk.download", lambda *_: False)
    monkeypatch.setattr(evals, "run_tasks", partial(evals.run_tasks, include=[folder], builtin=False))


def test_ruler_needles_cross_modes_at_the_question(model, calls, monkeypatch, ruler):
    options = EvalOptions(lengths=(600,), tasks=("niah_single_1",), limit=2, batch_size=2, progress=False)
    prompts = []
    generate = type(model).generate

    def watch(self, *args, **kwargs):
        prompts.append(kwargs["input_ids"])
        return generate(self, *args, **kwargs)

    monkeypatch.setattr(type(model), "generate", watch)
    result = evals.SUITES["cross-mode-ruler-niah"].run(model, byte_tokenizer(), options)
    assert result["suite"] == "cross-mode-ruler-niah"
    assert [row["modes"] for row in result["rows"] if row["task"] == "niah_single_1"] == PAIRS
    crossed = [call for call in calls if call not in MODES and len(call[0]) > 1 and call[0][100] != call[0][-1]]
    assert len(crossed) == 2
    tokenizer = byte_tokenizer()
    for call, attends_last in zip(crossed, (False, True), strict=True):
        for row, ids in zip(call, prompts[0].tolist(), strict=True):
            asked = [token for token, attends in zip(ids, row, strict=True) if attends is attends_last]
            # skip padding, which counts as linear mode
            question = tokenizer.decode(asked, skip_special_tokens=True)
            assert question.startswith("What is the special magic number for ")
            assert question.endswith("mentioned in the provided text is")
    isolated = evals.SUITES["isolated-ruler-niah"].run(model, tokenizer, options)
    assert [row["modes"] for row in isolated["rows"] if row["task"] == "niah_single_1"] == ["linear", "attention"]


def test_prompt_without_rulers_question_raises():
    with pytest.raises(ValueError, match="must hold 'What is the special magic'"):
        evals._question_start(byte_tokenizer(), byte_tokenizer()("no question")["input_ids"])


def test_suite_names_differ_from_core():
    assert not set(evals.SUITES) & set(CORE_SUITES)
    assert all(suite.summary for suite in evals.SUITES.values())


def test_training_mode_is_restored(model, text):
    model.train()
    options = EvalOptions(limit=1, lengths=(64,), text=text, tasks=("one switch",), progress=False)
    evaluate(model, byte_tokenizer(), ["switch-perplexity"], options, suites=evals.SUITES)
    assert model.training
    model.eval()


def test_command_lists_recipes_and_suites(capsys):
    from tokenmix_oryx.cli import main

    assert main(["info"]) == 0
    out = capsys.readouterr().out
    for name in ("tiny-tg", "tm-1.4b", "mamba2-130m", "switch-perplexity", "cross-mode-recall"):
        assert name in out
    assert main(["info", "tm-130m"]) == 0
    assert "tokenmix_oryx" in capsys.readouterr().out


def test_boundaries_are_counted_from_the_end_of_rows():
    split = evals._split_rows([3, 5], 6, "linear", "attention")
    assert split.tolist() == [[t >= 3 for t in range(6)], [t >= 5 for t in range(6)]]
    assert evals._split_rows([3], 6, "attention", "linear").tolist() == [[t < 3 for t in range(6)]]
