"""Test lm-eval through the adapter: local tasks give directly computed results, and missing data is named."""

import json
import re
import sys

import pytest
import torch

from tokenmix_core._utils.optional import install_command
from tokenmix_core._utils.trust import trusting
from tokenmix_core.evaluation.options import EvalOptions
from tokenmix_core.evaluation.suites import SUITES
from tokenmix_core.evaluation.tasks import cloze


def test_without_lm_eval_the_command_that_installs_it_is_named(llama, tokenizer, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    for name in ("commonsense", "recall", "ruler", "longbench"):
        with pytest.raises(ImportError, match=re.escape(install_command("tokenmix-core[eval]"))):
            SUITES[name].run(llama, tokenizer, EvalOptions())


ROW = {
    "context": "[DOC] Alpha is one. Beta is TWO. What is beta?",
    "question": "What is beta?",
    "answers": ["two", "2"],
}


def test_cloze_prompt_is_the_passage_and_the_question_once():
    assert cloze.prompt(ROW) == "Alpha is one. Beta is TWO. What is beta?"
    assert cloze.first_answer(ROW) == " two"
    assert cloze.prompt({**ROW, "context": "No end"}) == "No end. What is beta?"


@pytest.mark.parametrize(("said", "right"), [("It is Two, I think", 1), ("that makes 2", 1), ("three", 0)])
def test_cloze_counts_a_completion_that_contains_an_answer(said, right):
    assert cloze.contains(ROW, [said]) == {"contains": right}


@pytest.mark.parametrize("around_answer", [False, True])
@pytest.mark.parametrize("at", [0, 120, 240])
def test_cloze_passages_are_cut_to_fit_around_the_answer(tokenizer, around_answer, at):
    words = [f"w{i:03}" for i in range(240)]
    words.insert(at, "needle")
    row = {"context": " ".join(words), "question": "Where?", "answers": ["Needle"]}
    short = cloze.cut(row, tokenizer, 300, around_answer=around_answer)
    # white space at the ends of a passage is removed
    assert (
        300 - cloze.ANSWER_TOKENS - 2 <= len(tokenizer(cloze.prompt(short))["input_ids"]) <= 300 - cloze.ANSWER_TOKENS
    )
    assert short["context"] in row["context"]
    if around_answer:
        assert "needle" in short["context"]
    else:
        assert row["context"].startswith(short["context"])
    assert cloze.cut(row, tokenizer, 5000, around_answer=around_answer) == row
    with pytest.raises(ValueError, match="max_length=55"):
        cloze.cut(row, tokenizer, 55, around_answer=around_answer)


LOCAL = """
import datasets

def words(**metadata):
    rows = [{"text": f"{w} {w} {w}", "answer": w} for w in ("ab", "cd", "ef", "gh")]
    return {"test": datasets.Dataset.from_list(rows)}

def choices(**metadata):
    texts = enumerate(("x", "yy", "the end", "so"))
    rows = [{"text": t, "choices": ["aa", "zq", "7!"], "gold": i % 3} for i, t in texts]
    return {"test": datasets.Dataset.from_list(rows)}

def few(**metadata):
    return {"test": choices()["test"].select(range(2))}

def length(doc, results):
    return {"said": float(len(results[0]) > 0), "contains": float(doc["answer"] in results[0])}
"""
WORDS = """
task: local_words
custom_dataset: !function local.words
output_type: generate_until
test_split: test
doc_to_text: "{{text}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["QQ"], max_gen_toks: 5, do_sample: false}
process_results: !function local.length
metric_list:
  - {metric: said, aggregation: mean, higher_is_better: true}
  - {metric: contains, aggregation: mean, higher_is_better: true}
"""
CHOICES = """
task: local_choices
custom_dataset: !function local.choices
output_type: multiple_choice
test_split: test
doc_to_text: "{{text}}"
doc_to_choice: "{{choices}}"
doc_to_target: gold
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
"""


GROUP = """
group: local_group
task: [local_choices, local_few]
"""


@pytest.fixture(scope="module")
def harness():
    pytest.importorskip("lm_eval")
    from tokenmix_core.evaluation import harness

    return harness


@pytest.fixture
def local(tmp_path):
    (tmp_path / "local.py").write_text(LOCAL)
    (tmp_path / "words.yaml").write_text(WORDS)
    (tmp_path / "choices.yaml").write_text(CHOICES)
    (tmp_path / "few.yaml").write_text(
        CHOICES.replace("local_choices", "local_few").replace("local.choices", "local.few")
    )
    (tmp_path / "group.yaml").write_text(GROUP)
    return tmp_path


def test_choices_are_those_of_the_largest_log_likelihood(harness, model, tokenizer, local):
    tasks = {"local_words": "said", "local_choices": "acc"}
    options = EvalOptions(batch_size=3, progress=False)
    result = harness.run_tasks("local", model, tokenizer, tasks, options, include=[local], builtin=False)
    values = {(row["task"], row["metric"]): row["value"] for row in result["rows"]}
    right = 0
    for i, context in enumerate(("x", "yy", "the end", "so")):
        scores = []
        for choice in ("aa", "zq", "7!"):
            ids = tokenizer(f"{context} {choice}", return_tensors="pt")["input_ids"]
            with torch.no_grad():
                log_p = model(input_ids=ids).logits.log_softmax(-1)[0, :-1]
            scores.append(float(log_p.gather(-1, ids[0, 1:, None])[-3:].sum()))
        right += max(range(3), key=scores.__getitem__) == i % 3
    assert values["local_choices", "acc"] == right / 4
    assert values["local_words", "said"] == 1
    assert values["average", "2 tasks"] == pytest.approx((1 + right / 4) / 2)
    assert all(row["examples"] == 4 for row in result["rows"][:3])


def test_a_task_that_fails_costs_no_other_task(harness, model, tokenizer, local):
    (local / "local.py").write_text(LOCAL + "\ndef broken(doc, results):\n    raise RuntimeError('no such answer')\n")
    broken = WORDS.replace("local_words", "local_broken").replace("local.length", "local.broken")
    (local / "broken.yaml").write_text(broken)
    tasks = {"local_broken": "said", "local_words": "said", "local_choices": "acc"}
    options = EvalOptions(batch_size=3, progress=False)
    result = harness.run_tasks("local", model, tokenizer, tasks, options, include=[local], builtin=False)
    # without this task there is no average over the others
    assert {row["task"] for row in result["rows"]} == {"local_words", "local_choices"}
    assert {name: str(error) for name, error in result["failed"].items()} == {"local_broken": "no such answer"}
    with pytest.raises(RuntimeError, match="no such answer"):
        harness.run_tasks("local", model, tokenizer, {"local_broken": "said"}, options, include=[local], builtin=False)


def test_a_group_is_the_mean_of_its_tasks_by_their_examples(harness, model, tokenizer, local):
    options = EvalOptions(include=(str(local),), progress=False)
    tasks = {"local_group": "acc", "local_words": "said"}
    with pytest.raises(ValueError, match=r"task files can run Python code: read those in .*--trust-remote-code"):
        harness.run_tasks("x", model, tokenizer, tasks, options, include=(), builtin=False)
    with trusting(True):
        result = harness.run_tasks("x", model, tokenizer, tasks, options, include=(), builtin=False)
    rows = {(row["task"], row["metric"]): row for row in result["rows"]}
    many, few = rows["local_choices", "acc"], rows["local_few", "acc"]
    group = rows["local_group", "acc"]
    assert (many["examples"], few["examples"], group["examples"]) == (4, 2, 6)
    assert group["value"] == pytest.approx((4 * many["value"] + 2 * few["value"]) / 6)
    assert rows["average", "2 tasks"]["value"] == pytest.approx((group["value"] + 1) / 2)
    # a single task is not a group
    assert sum(task == "local_words" for task, _ in rows) == 2


def test_any_task_is_run_by_its_name_from_the_command_line(harness, checkpoint, local, tmp_path, capsys):
    from tokenmix_core.cli.app import main

    call = ["eval", str(checkpoint), "--include", str(local), "--out", str(tmp_path / "out"), "--limit", "3"]
    assert main([*call, "--tasks", "local_words"]) == 2
    assert "task files can run Python code" in capsys.readouterr().err
    call.append("--trust-remote-code")
    assert main([*call, "--tasks", "local_group,local_words"]) == 0
    result = json.loads((tmp_path / "out" / "lm-eval.json").read_text())
    found = {(row["task"], row["metric"]): row["examples"] for row in result["rows"]}
    assert found == {
        **{("local_choices", "acc"): 3, ("local_few", "acc"): 2, ("local_group", "acc"): 5},
        **{("local_words", "said"): 3, ("local_words", "contains"): 3},
    }
    capsys.readouterr()
    assert main([*call, "--tasks", "local_word"]) == 2
    assert "no task local_word; the nearest to local_word are local_words" in capsys.readouterr().err
    assert main([*call, "--tasks", "local_words", "--include", "no/folder"]) == 2
    assert "include must name folders with task files, and 'no/folder' is none" in capsys.readouterr().err


def test_limit_and_choice_of_tasks_are_kept(harness, llama, tokenizer, local):
    tasks = {"local_words": "said", "local_choices": "acc"}
    options = EvalOptions(tasks=("local_choices",), limit=2, progress=False)
    result = harness.run_tasks("local", llama, tokenizer, tasks, options, include=[local], builtin=False)
    assert [(row["task"], row["examples"]) for row in result["rows"]] == [("local_choices", 2)]


def test_own_cloze_tasks_run_on_their_data_and_cut_it(harness, llama, tokenizer, monkeypatch):
    import datasets

    asked = []

    def load_dataset(name, **_):
        asked.append(name)
        rows = [{"context": "word " * 200, "question": "The word is", "answers": ["word"]}] * 3
        return datasets.Dataset.from_list(rows)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    tasks = dict.fromkeys(("recall_nq", "recall_triviaqa", "recall_drop"), "contains")
    seen = []
    generate = type(llama).generate
    monkeypatch.setattr(
        type(llama),
        "generate",
        lambda self, input_ids, **kw: seen.append(input_ids.shape[1]) or generate(self, input_ids=input_ids, **kw),
    )
    options = EvalOptions(max_length=128, progress=False)
    result = harness.run_tasks("recall", llama, tokenizer, tasks, options, builtin=False)
    assert asked == ["hazyresearch/based_nq_2048", "hazyresearch/based_triviaqa", "hazyresearch/based_drop"]
    assert {(row["task"], row["metric"]) for row in result["rows"]} == {
        *((task, "contains") for task in tasks),
        ("average", "3 tasks"),
    }
    assert all(128 - cloze.ANSWER_TOKENS - 2 <= length <= 128 - cloze.ANSWER_TOKENS for length in seen)
    assert len(seen) == 3


def test_missing_data_is_named_in_one_sentence(harness, llama, tokenizer, monkeypatch, tmp_path):
    from datasets import config
    from huggingface_hub import constants

    monkeypatch.setattr(config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(config, "HF_DATASETS_CACHE", tmp_path)
    tasks = dict.fromkeys(("recall_nq", "recall_drop"), "contains")
    with pytest.raises(ValueError, match="HF_HUB_OFFLINE=1") as error:
        harness.run_tasks("recall", llama, tokenizer, tasks, EvalOptions(progress=False), builtin=False)
    assert "hazyresearch/based_nq_2048, hazyresearch/based_drop (for recall_nq, recall_drop)" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_library_that_a_task_misses_is_named(harness, llama, tokenizer, tmp_path):
    (tmp_path / "local.py").write_text("import no_such_library\n" + LOCAL)
    (tmp_path / "words.yaml").write_text(WORDS)
    tasks = {"local_words": "said"}
    with pytest.raises(ImportError, match=r"local_words needs .*no_such_library.* pip install 'lm-eval\["):
        harness.run_tasks("x", llama, tokenizer, tasks, EvalOptions(), include=[tmp_path], builtin=False)


def test_unknown_tasks_are_named(harness, llama, tokenizer, local):
    with pytest.raises(ValueError, match="no task local_other"):
        harness.run_tasks("x", llama, tokenizer, {"local_other": "acc"}, EvalOptions(), include=[local], builtin=False)


@pytest.fixture
def ruler_folder(harness):
    pytest.importorskip("wonderwords")
    from pathlib import Path

    import lm_eval.tasks

    return Path(lm_eval.tasks.__file__).parent / "ruler"


def test_ruler_builds_its_first_needles_here_and_keeps_whole_prompts(
    harness, llama, tokenizer, ruler_folder, monkeypatch
):
    monkeypatch.setattr("nltk.download", lambda *_: False)
    seen = []
    generate = type(llama).generate
    monkeypatch.setattr(
        type(llama),
        "generate",
        lambda self, input_ids, **kw: seen.append(input_ids) or generate(self, input_ids=input_ids, **kw),
    )
    options = EvalOptions(lengths=(600, 1200), limit=2, batch_size=1, progress=False)
    tasks = {"niah_single_1": ""}
    result = harness.run_tasks("ruler", llama, tokenizer, tasks, options, include=[ruler_folder], builtin=False)
    assert [(row["task"], row["metric"]) for row in result["rows"]] == [
        (task, length) for task in ("niah_single_1", "average") for length in ("600", "1200")
    ]
    assert len(seen) == 4
    # the model's own 1,024 positions do not cut a longer context, nor its beginning
    assert all(tokenizer.decode(ids[0]).startswith("A special magic number") for ids in seen)
    assert result["settings"]["max_length"] == 1200


@pytest.mark.parametrize(
    ("tasks", "lengths", "said"),
    [
        (("ruler_vt", "ruler_fwe"), (4096,), "ruler_vt begins with .* choose the other tasks: ruler_fwe"),
        (("ruler_cwe",), (4096, 1024), "ruler_cwe at 4096 tokens needs at least"),
        (("niah_single_1",), (256,), "at least 512 tokens, got 256"),
        (("niah_single_1",), (), "got none"),
    ],
)
def test_ruler_lengths_that_would_never_end_are_refused(harness, tokenizer, ruler_folder, tasks, lengths, said):
    with pytest.raises(ValueError, match=said):
        harness.check_ruler(tasks, tokenizer, lengths)
