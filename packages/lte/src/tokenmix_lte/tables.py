"""Tables 1 to 3 of the paper: for each table a suite that measures a model's row, and a command that joins the rows."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tokenmix_core.evaluation import (
    COMMONSENSE,
    LM_EVAL_READS,
    RECALL,
    EvalOptions,
    Suite,
    SuiteResult,
    format_rows,
    recall_suite,
    run_tasks,
    write_result,
)

# maximum length of a prompt in tokens; as in the paper, longer prompts are truncated
EVAPORATE_LENGTH = 4096
NIAH = ("niah_single_1", "niah_single_2", "niah_single_3")
NIAH_LENGTHS = (1024, 2048, 4096)
# the columns of the paper; all scores are percentages, except "ppl"
SHORT = {
    "Wiki. ppl": ("wikitext", "word_perplexity"),
    "LMB ppl": ("lambada_openai", "perplexity"),
    "LMB acc": ("lambada_openai", "acc"),
    "PIQA acc": ("piqa", "acc"),
    "Hella acc_n": ("hellaswag", "acc_norm"),
    "Winog. acc": ("winogrande", "acc"),
    "ArcE acc": ("arc_easy", "acc"),
    "ArcC acc_n": ("arc_challenge", "acc_norm"),
    "BoolQ acc": ("boolq", "acc"),
    "SciQ acc": ("sciq", "acc"),
    "SIQA acc": ("social_iqa", "acc"),
}
_RECALL_NAMES = {
    "FDA": "fda",
    "SWDE": "swde",
    "NQ": "recall_nq",
    "SQuAD": "squad_completion",
    "TQA": "recall_triviaqa",
    "DROP": "recall_drop",
}
EVAPORATE = {column: (task, RECALL[task]) for column, task in _RECALL_NAMES.items()}
# the paper's names of models by the kinds of their layers, in the order of the paper
MODELS = {
    ("gated_delta_net",): "GDN",
    ("gated_delta_net", "window"): "GDN+SWA",
    ("gated_delta_net", "lte cnn"): "laLTE",
    ("gated_delta_net", "nsa"): "laNSA",
    ("attention", "gated_delta_net"): "GDN+Attn.",
    ("nsa",): "NSA",
    ("attention",): "Transf.++",
    ("gated_delta_net", "lte mlp"): "LTE-MLP",
    ("lte cnn",): "Pure LTE",
    ("gated_delta_net", "tova"): "TOVA",
    ("gated_delta_net", "lte uniform"): "Unif.+SWA",
}


def commonsense_suite(model: Any, tokenizer: Any, options: EvalOptions) -> SuiteResult:
    """Run the nine zero-shot tasks of the paper and WikiText; average the nine accuracies."""
    tasks = {task: COMMONSENSE[task] for task in dict.fromkeys(task for task, _ in SHORT.values())}
    return run_tasks(
        "commonsense", model, tokenizer, tasks, options, average_over=[task for task in tasks if task != "wikitext"]
    )


def needle_suite(model: Any, tokenizer: Any, options: EvalOptions) -> SuiteResult:
    """Run RULER's S-NIAH 1 to 3, at 1,024, 2,048 and 4,096 tokens by default."""
    options = replace(options, lengths=options.lengths or NIAH_LENGTHS)
    return run_tasks("ruler", model, tokenizer, dict.fromkeys(NIAH, ""), options)


def evaporate_suite(model: Any, tokenizer: Any, options: EvalOptions) -> SuiteResult:
    """Run core's `recall` suite (FDA, SWDE, NQ, SQuAD, TriviaQA, DROP; paper, Table 3), by default up to 4K tokens."""
    options = replace(options, max_length=options.max_length or EVAPORATE_LENGTH)
    return {**recall_suite(model, tokenizer, options), "suite": "evaporate"}


def needle_columns(options: EvalOptions) -> dict[str, tuple[str, str]]:
    """Return the columns of the paper's Table 2 for the context lengths of `options`."""
    lengths = options.lengths or NIAH_LENGTHS
    return {f"S{i}-{n / 1024:g}K": (task, str(n)) for i, task in enumerate(NIAH, 1) for n in lengths}


def model_name(config: Any) -> str:
    """Return the paper's name for a model; the kinds of its layers if the paper does not have the model."""
    kinds = set()
    for i in range(config.num_hidden_layers):
        kind, options = config.mixer_type(i), config.options_of(i)
        if kind == "lte":
            kind = f"lte {options.get('scorer', 'cnn')}"
        elif kind == "attention" and options.get("window") is not None:
            kind = "window"
        kinds.add(kind)
    return MODELS.get(tuple(sorted(kinds)), " + ".join(sorted(kinds)))


def table_row(model: Any, columns: Mapping[str, tuple[str, str]], result: SuiteResult) -> dict[str, Any]:
    """Return a model's row: a value for each column, None for a task that was not run, and the mean of all scores."""
    values = {(row["task"], row["metric"]): row["value"] for row in result["rows"]}
    row: dict[str, Any] = {"Model": model_name(model.config), "parameters": model.num_parameters()}
    scores = []
    for column, key in columns.items():
        value, is_score = values.get(key), not column.endswith("ppl")
        row[column] = 100 * value if is_score and value is not None else value
        scores += [row[column]] if is_score else []
    row["Avg."] = None if None in scores else sum(scores) / len(scores)
    return row


def _table_suite(name: str, summary: str, measure: Any, columns_of: Any) -> Suite:
    def run(model: Any, tokenizer: Any, options: EvalOptions) -> SuiteResult:
        result: SuiteResult = measure(model, tokenizer, options)
        row = table_row(model, columns_of(options), result)
        return {**result, "suite": name, "rows": [row], "plots": []}

    return Suite(summary, run, reads=LM_EVAL_READS)


TABLES: dict[str, Suite] = {
    name: _table_suite(name, f"a model's row of Table {name[-1]}: {what}, through lm-eval", measure, columns_of)
    for name, what, measure, columns_of in (
        ("table-1", "WikiText, LAMBADA and eight other short tasks", commonsense_suite, lambda options: SHORT),
        ("table-2", "RULER's S-NIAH 1 to 3 at 1K, 2K and 4K", needle_suite, needle_columns),
        ("table-3", "EVAPORATE, prompts of 4K", evaporate_suite, lambda options: EVAPORATE),
    )
}


def joined(name: str, folders: list[str]) -> SuiteResult | None:
    """Join the rows that `eval` has written to models' folders into a table in the paper's order; None without rows.

    Settings that differ between the models become columns.
    """
    order = list(MODELS.values())
    found: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for folder in folders:
        path = Path(folder) / "evaluation" / f"{name}.json"
        if path.is_file():
            result = json.loads(path.read_text(encoding="utf-8"))
            settings = {key: value for key, value in result["settings"].items() if key != "seconds"}
            found += [(row, settings) for row in result["rows"]]
    if not found:
        return None
    first = found[0][1]
    common = {key for key in first if all(settings.get(key) == first[key] for _, settings in found)}
    rows = [row | {key: x for key, x in settings.items() if key not in common} for row, settings in found]
    # sort by size first (parameter counts within one size differ by less than a fifth)
    rows.sort(key=lambda row: (row["parameters"] > 7e8, order.index(row["Model"]) if row["Model"] in order else 99))
    return {"suite": name, "settings": {key: first[key] for key in first if key in common}, "rows": rows, "plots": []}


def command(args: argparse.Namespace, context: Any) -> None:
    """Run the command `tokenmix-lte tables`: print and write the tables of the models that `eval` has measured."""
    tables = [table for name in TABLES if (table := joined(name, args.checkpoints)) is not None]
    if not tables:
        raise ValueError(
            f"none of {', '.join(args.checkpoints)} has a row; measure it with: tokenmix-lte eval CHECKPOINT "
            + " ".join(f"--suite {name}" for name in TABLES)
        )
    for table in tables:
        print(f"\n{table['suite']}\n{format_rows(table['rows'])}", flush=True)
        if args.out is not None:
            print(f"written: {', '.join(map(str, write_result(table, args.out)))}")
