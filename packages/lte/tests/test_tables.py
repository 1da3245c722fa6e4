"""The suites of Tables 1 to 3 run lm-eval's tasks on small models, and `tables` joins their rows as the paper does."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from tokenmix_core.data.tokenizer import byte_tokenizer
from tokenmix_core.modeling import HybridConfig, HybridForCausalLM
from tokenmix_lte import tables
from tokenmix_lte.cli import main
from tokenmix_lte.model import LteConfig, LteForCausalLM
from tokenmix_lte.recipes import RECIPES

# number of questions, of four per task, whose answer is the first choice: all choices are the same text, so that a
# model selects the first
RIGHT = {"piqa": 1, "hellaswag": 2, "winogrande": 3, "ai2_arc/ARC-Easy": 4, "ai2_arc/ARC-Challenge": 1, "boolq": 2}
RIGHT |= {"siqa": 3, "based-fda": 1, "based-swde-v2": 2, "based_nq_2048": 3, "based-squad": 4, "based_triviaqa": 0}
RIGHT |= {"based_drop": 2}


def question(name: str, first: bool) -> dict:
    """Return a question of the named data set, whose answer is the first choice if `first`."""
    label, two = (0 if first else 1), ["same", "same"]
    # the empty string is in every continuation
    answer = "" if first else "§"
    if name.startswith("based_"):
        return {"context": "Alpha is one.", "question": "Beta is", "answers": [answer]}
    if name.startswith("based-"):
        return {"text": "Alpha is", "value": answer}
    fields: dict[str, dict] = {
        "wikitext_document_level": {"page": "Alpha is one . Beta is two ."},
        "lambada_openai": {"text": "Alpha is one and Beta is two"},
        "piqa": {"goal": "Alpha", "sol1": "same", "sol2": "same", "label": label},
        "hellaswag": {"ctx_a": "a", "ctx_b": "b", "activity_label": "c", "endings": two, "label": str(label)},
        "winogrande": {"sentence": "An _ is.", "option1": "same", "option2": "same", "answer": str(label + 1)},
        "ai2_arc": {"question": "q", "choices": {"text": two, "label": ["A", "B"]}, "answerKey": "AB"[label]},
        "super_glue": {"passage": "p", "question": "q", "label": label},
        "sciq": {"support": "s", "question": "q", "correct_answer": "same"}
        | {f"distractor{i}": "same" for i in (1, 2, 3)},
        "siqa": {"context": "c", "question": "q", "label": str(label + 1)} | {f"answer{x}": "same" for x in "ABC"},
        "paul_graham_essays": {"text": "An essay has sentences. " * 40},
    }
    return fields[name]


def load_dataset(path, name=None, split=None, **_):
    """Return four questions in each split, as the data set of this path has them."""
    import datasets

    kind = path.partition("/")[2]
    right = RIGHT.get(kind, RIGHT.get(f"{kind}/{name}", RIGHT.get(str(name), 0)))
    rows = datasets.Dataset.from_list([question(kind, i < right) for i in range(4)])
    return rows if split is not None else dict.fromkeys(("train", "validation", "test"), rows)


@pytest.fixture
def offline(monkeypatch):
    """Give lm-eval only the tables' tasks, with the data sets of this file; indexing all its tasks would take 10 s."""
    lm_eval = pytest.importorskip("lm_eval.tasks")
    pytest.importorskip("wonderwords")
    manager, folder = lm_eval.TaskManager, Path(lm_eval.__file__).parent
    names = ("wikitext", "lambada", "piqa", "hellaswag", "winogrande", "arc", "super_glue/boolq", "sciq", "siqa")
    known = [folder / name for name in (*names, "ruler", "fda", "swde", "squad_completion")]

    def some(include_path, include_defaults, metadata):
        assert include_defaults
        return manager(include_path=[*known, *include_path], include_defaults=False, metadata=metadata)

    monkeypatch.setattr(lm_eval, "TaskManager", some)
    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    monkeypatch.setattr("nltk.download", lambda *_: False)
    monkeypatch.setattr("lm_eval.tasks.ruler.prepare_niah.sent_tokenize", lambda text: text.split(". "))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    fields = {"vocab_size": 264, "hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 16}
    gdn = {"gated_delta_net": {"num_heads": 1, "head_dim": 8}}
    lte = {"lte": {"num_heads": 2, "window": 16, "cap": 6, "sinks": 2}}
    attention = {"attention": {"num_heads": 2}}
    torch.manual_seed(0)
    models = {
        "lalte": LteForCausalLM(LteConfig(**fields, mixers=[*gdn, *lte], mixer_options=gdn | lte)),
        "gdn": HybridForCausalLM(HybridConfig(**fields, mixers=[*gdn], mixer_options=gdn)),
        "full": HybridForCausalLM(HybridConfig(**fields, mixers=[*gdn, *attention], mixer_options=gdn | attention)),
    }
    made = tmp_path_factory.mktemp("models")
    for name, model in models.items():
        model.save_pretrained(made / name)
        byte_tokenizer().save_pretrained(made / name)
    return {name: str(made / name) for name in models}


def test_the_tables_have_the_paper_s_columns_and_order(folders, tmp_path, offline, capsys):
    # batches of one question, in which equal choices have equal likelihoods
    flags = ["--batch-size", "1", "--limit", "4"]
    assert main(["eval", folders["lalte"], "--suite", "table-1", *flags, "--cap", "none"]) == 0
    assert main(["eval", folders["lalte"], "--suite", "table-3", "--limit", "4"]) == 0
    assert main(["eval", folders["gdn"], "--suite", "table-1", *flags]) == 0
    needles = ["--suite", "table-2", "--lengths", "640,1024", "--limit", "1"]
    assert main(["eval", folders["full"], *needles]) == 0
    capsys.readouterr()
    assert main(["tables", *folders.values(), "--out", str(tmp_path / "tables")]) == 0
    shown = capsys.readouterr().out
    assert shown.index("| GDN ") < shown.index("| laLTE ")
    short, needle, recall = (json.loads((tmp_path / "tables" / f"table-{i}.json").read_text()) for i in (1, 2, 3))
    assert [row["Model"] for row in short["rows"]] == ["GDN", "laLTE"]
    about = {"Model", "parameters", "Avg.", "cap"}
    for row in short["rows"]:
        assert [column for column in row if column not in about] == list(tables.SHORT)
        wanted = {"PIQA acc": 25, "Hella acc_n": 50, "Winog. acc": 75, "ArcE acc": 100, "ArcC acc_n": 25}
        wanted |= {"BoolQ acc": row["BoolQ acc"], "SciQ acc": 0, "SIQA acc": 75, "LMB acc": row["LMB acc"]}
        assert {column: row[column] for column in wanted} == wanted
        assert row["Avg."] == pytest.approx(sum(wanted.values()) / 9)
        assert 1 < row["Wiki. ppl"] < math.inf
        assert 1 < row["LMB ppl"] < math.inf
    # the limits of the evaluation are in the row
    assert short["rows"][1]["cap"] == "none"
    (row,) = needle["rows"]
    assert row["Model"] == "GDN+Attn."
    assert [column for column in row if column not in about] == [
        f"S{i}-{n}K" for i in (1, 2, 3) for n in ("0.625", "1")
    ]
    (row,) = recall["rows"]
    assert {k: v for k, v in row.items() if k not in about} == {
        **{"FDA": 25, "SWDE": 50, "NQ": 75, "SQuAD": 100, "TQA": 0, "DROP": 50}
    }
    assert row["Avg."] == 50


def test_a_task_alone_has_no_average(folders):
    model = HybridForCausalLM.from_pretrained(folders["gdn"])
    rows = [{"task": "piqa", "metric": "acc", "value": 0.25}]
    row = tables.table_row(model, tables.SHORT, {"suite": "", "settings": {}, "rows": rows, "plots": []})
    assert (row["PIQA acc"], row["SIQA acc"], row["Avg."]) == (25, None, None)


def test_commonsense_has_the_nine_tasks_of_the_paper(folders, monkeypatch):
    asked = {}
    monkeypatch.setattr(tables, "run_tasks", lambda *x, **y: asked.update(tasks=x[3], **y))
    tables.commonsense_suite(None, None, tables.EvalOptions())
    assert len(asked["average_over"]) == 9
    assert set(asked["tasks"]) - set(asked["average_over"]) == {"wikitext"}
    assert "openbookqa" not in asked["tasks"]


def test_models_have_the_paper_s_names():
    named = {name: tables.model_name(recipe().model_config()) for name, recipe in RECIPES.items()}
    assert [named[f"{kind}-0.4b"] for kind in ("gdn", "gdn-swa", "lalte", "lansa", "gdn-attention", "nsa")] == [
        *("GDN", "GDN+SWA", "laLTE", "laNSA", "GDN+Attn.", "NSA")
    ]
    assert [named[name] for name in ("transformer-1.4b", "lalte-0.4b-mlp", "lte-0.4b")] == [
        *("Transf.++", "LTE-MLP", "Pure LTE")
    ]
    assert named["lalte-0.4b-causal"] == "gated_delta_net + lte causal"


def test_folders_without_rows_are_refused(tmp_path, capsys):
    assert main(["tables", str(tmp_path)]) == 2
    assert "measure it with: tokenmix-lte eval CHECKPOINT --suite table-1" in capsys.readouterr().err
