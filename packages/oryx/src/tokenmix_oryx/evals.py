"""The paper's measurements: benchmarks in each mode, and recall of a context that was read in another mode."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor
from tqdm import tqdm

from tokenmix_core.data import NIAH_TASKS, NiahExample
from tokenmix_core.evaluation import (
    LM_EVAL_READS,
    NIAH_LENGTHS,
    EvalOptions,
    Parts,
    Plot,
    Series,
    Suite,
    SuiteResult,
    answer_loss,
    commonsense_suite,
    generate_text,
    mqar_cases,
    mqar_suite,
    niah_examples,
    niah_haystack,
    niah_suite,
    one_sequence,
    perplexity_suite,
    recall_suite,
    run_tasks,
)
from tokenmix_oryx.generation import PromptMode
from tokenmix_oryx.modes import ATTENTION, MODES
from tokenmix_oryx.switch_evals import BY_ROW, switch_suite

# fraction of a prompt that counts as context if the end of the context is unknown
CONTEXT_SHARE = 0.975
# columns of the paper's Tables 1 and 9 whose metrics are averaged
LANGUAGE = {
    "lambada_openai": "acc",
    "hellaswag": "acc_norm",
    "piqa": "acc",
    "arc_easy": "acc",
    "arc_challenge": "acc_norm",
    "winogrande": "acc",
    "openbookqa": "acc",
}
RULER_NIAH = ("niah_single_1", "niah_single_2", "niah_single_3")
# beginning of the question that follows RULER's haystack
_QUESTION = "What is the special magic"


def language_modeling_suite(model: Any, tokenizer: Any, options: EvalOptions) -> SuiteResult:
    """Run the seven tasks of the paper's Tables 1 and 9 zero-shot and average them."""
    return run_tasks("language-modeling", model, tokenizer, LANGUAGE, options)


def ruler_niah_suite(model: Any, tokenizer: Any, options: EvalOptions) -> SuiteResult:
    """Run RULER's single needles (NIAH-1 to 3; paper, Tables 2 and 3), by default at 2,048 tokens; average them."""
    options = replace(options, lengths=options.lengths or (2048,))
    result = run_tasks("ruler", model, tokenizer, dict.fromkeys(RULER_NIAH, ""), options)
    return {**result, "suite": "ruler-niah"}


def isolated(
    name: str, suite: Callable[[Any, Any, EvalOptions], SuiteResult], reads: tuple[str, ...] | None = None
) -> Suite:
    """Return a suite that runs core's `suite` with all tokens in one mode, for each mode (Oryx paper, Tables 1 and 2).

    A column of its table names the mode. `reads` names the options that core's suite reads, as `Suite.reads` does.
    """

    def run(model: Any, tokenizer: Any, options: EvalOptions) -> SuiteResult:
        schedules = {mode: (mode,) for mode in MODES}
        return _by_mode(f"isolated-{name}", model, schedules, lambda: suite(model, tokenizer, options))

    return Suite(f"{name} in each mode alone", run, reads=reads)


def crossed() -> Iterator[tuple[str, str, str]]:
    """Yield (name, mode of the context, mode of question and answer) for every pair of modes."""
    for prompt in MODES:
        for context in MODES:
            yield f"{context} → {prompt}", context, prompt


def cross_recall_suite(model: Any, tokenizer: Any, options: EvalOptions) -> SuiteResult:
    """Run cloze questions for each pair of modes: 97.5 % of the prompt in the first, its rest and the answer in the
    second (paper, Table 3)."""
    schedules = {name: ([(0.0, context), (CONTEXT_SHARE, prompt)], prompt) for name, context, prompt in crossed()}
    return _by_mode("cross-mode-recall", model, schedules, lambda: recall_suite(model, tokenizer, options))


def cross_ruler_niah_suite(model: Any, tokenizer: Any, options: EvalOptions) -> SuiteResult:
    """Run RULER's single needles for each pair of modes: the haystack in the first, question and answer in the second
    (paper, Table 3)."""
    schedules = {name: (_before_question(tokenizer, context, prompt), prompt) for name, context, prompt in crossed()}
    return _by_mode("cross-mode-ruler-niah", model, schedules, lambda: ruler_niah_suite(model, tokenizer, options))


def _before_question(tokenizer: Any, context: str, prompt: str) -> PromptMode:
    """Return a function of a prompt that gives tokens before RULER's question the mode `context`, others `prompt`."""

    def modes(input_ids: Int[Tensor, "B T"]) -> Bool[Tensor, "B T"]:
        boundaries = [_question_start(tokenizer, row) for row in input_ids.tolist()]
        return _split_rows(boundaries, input_ids.shape[1], context, prompt)

    return modes


def _question_start(tokenizer: Any, tokens: list[int]) -> int:
    """Return the index of the last token from which on the decoded text still contains RULER's whole question."""
    if _QUESTION not in tokenizer.decode(tokens):
        raise ValueError(f"a prompt of RULER's needles must hold {_QUESTION!r}, got {tokenizer.decode(tokens[-64:])!r}")
    low, high = 0, len(tokens)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _QUESTION in tokenizer.decode(tokens[middle:]) else (low, middle)
    return low


def cross_mqar_suite(model: Any, tokenizer: Any, options: EvalOptions) -> SuiteResult:
    """Run associative recall for each pair of modes: the key-value pairs in the first, the queries in the second."""
    cases = mqar_cases(model, options)
    chosen = options.choose("cross-mode-mqar", tuple(cases))
    rows, samples, settings, parts = [], [], {}, Parts()
    for (name, context, prompt), task in itertools.product(crossed(), chosen):
        with parts.part(f"{name}, {task}"), model.modes([(0, context), (2 * cases[task][1], prompt)]):
            result = mqar_suite(model, tokenizer, replace(options, tasks=(task,), progress=False))
            rows += [{"modes": name, **row} for row in result["rows"]]
            samples += result.get("samples", [])
            settings = {**result["settings"], **BY_ROW}
    plots = [_accuracy_plot("Associative recall, pairs → queries", "pairs", rows)]
    result = {"suite": "cross-mode-mqar", "settings": settings, "rows": rows, "plots": plots, "samples": samples}
    return parts.result(SuiteResult(**result))


def cross_niah_suite(model: Any, tokenizer: Any, options: EvalOptions) -> SuiteResult:
    """Run S-NIAH 1 to 3 for each pair of modes: the haystack in the first, question and answer in the second (Oryx
    paper, Table 3)."""
    limit, batch_size = options.limit or 50, options.batch_size or 8
    tasks = options.choose("cross-mode-niah", tuple(NIAH_TASKS))
    haystack = niah_haystack(tasks, options, tokenizer)
    cases = [(task, length) for task in tasks for length in sorted(options.lengths or NIAH_LENGTHS)]
    rows, samples, parts = [], [], Parts()
    for task, length in tqdm(cases, desc="cross-mode-niah", unit="task", disable=not options.progress):
        for name, context, prompt in crossed():
            with parts.part(f"{name}, {task} at {length:,} tokens"):
                examples = niah_examples(task, tokenizer, length, limit, haystack=haystack, seed=options.seed)
                found, losses = [], []
                for start in range(0, limit, batch_size):
                    batch = examples[start : start + batch_size]
                    found += _found(model, tokenizer, batch, context, prompt)
                for example in examples:
                    with model.modes([(0, context), (_count(tokenizer, example.context), prompt)]):
                        losses.append(answer_loss(model, tokenizer, example))
                row = {"modes": name, "task": task, "length": length, "accuracy": float(np.mean(found))}
                rows.append({**row, "answer loss": float(np.mean(losses)), "examples": limit})
                samples.append([float(hit) for hit in found])
    plot = _accuracy_plot("Needle in a haystack, haystack → question", "length", rows)
    settings = {"seed": options.seed, **BY_ROW}
    result = {"suite": "cross-mode-niah", "settings": settings, "rows": rows, "plots": [plot], "samples": samples}
    return parts.result(SuiteResult(**result))


def _found(model: Any, tokenizer: Any, batch: Sequence[NiahExample], context: str, prompt: str) -> list[bool]:
    """Return, for each example, whether greedy decoding produces the needle's value."""
    prompts = [example.context + example.question for example in batch]
    new_tokens = max(_count(tokenizer, " " + example.answer) for example in batch) + 8
    lengths = [_count(tokenizer, p) for p in prompts]
    boundaries = [max(lengths) - n + _count(tokenizer, e.context) for n, e in zip(lengths, batch, strict=True)]
    said = generate_text(
        model,
        tokenizer,
        prompts,
        max_new_tokens=new_tokens,
        prefill_mode=_split_rows(boundaries, max(lengths), context, prompt),
        generation_mode=prompt,
    )
    return [example.answer in words for example, words in zip(batch, said, strict=True)]


def _split_rows(boundaries: Sequence[int], tokens: int, context: str, prompt: str) -> Bool[Tensor, "B T"]:
    """Return each token's mode, True for attention: `context` before the boundary of its row, and then `prompt`."""
    before = torch.arange(tokens) < torch.tensor(boundaries).unsqueeze(1)
    return torch.where(before, context == ATTENTION, prompt == ATTENTION)


def _count(tokenizer: Any, string: str) -> int:
    return len(tokenizer(string, verbose=False)["input_ids"])


def _by_mode(
    suite: str, model: Any, schedules: Mapping[str, tuple[Any, ...]], run: Callable[[], SuiteResult]
) -> SuiteResult:
    """Run a suite for each schedule, and join all rows and curves; a schedule is the arguments of `model.modes`."""
    results: dict[str, SuiteResult] = {}
    parts = Parts()
    for name, schedule in schedules.items():
        with parts.part(name), model.modes(*schedule):
            results[name] = parts.take(name, run())
    if not results:
        return parts.result({"suite": suite, "settings": {}, "rows": [], "plots": []})
    rows = [{"modes": name, **row} for name, result in results.items() for row in result["rows"]]
    first = next(iter(results.values()))
    plots: list[Plot] = []
    for i, plot in enumerate(first["plots"]):
        series = {
            f"{name}: {curve}": points
            for name, result in results.items()
            for curve, points in result["plots"][i]["series"].items()
        }
        plots.append({**plot, "series": series})
    settings = {**first["settings"], **BY_ROW}
    joined: SuiteResult = {"suite": suite, "settings": settings, "rows": rows, "plots": plots}
    if all("samples" in result for result in results.values()):
        joined["samples"] = [values for result in results.values() for values in result.get("samples", [])]
    return parts.result(joined)


def _accuracy_plot(title: str, x: str, rows: list[dict[str, Any]]) -> Plot:
    series: Series = {}
    for row in rows:
        name = f"{row['modes']}, {row['task'] if x == 'length' else row['length']}"
        xs, ys = series.setdefault(name, ([], []))
        xs.append(row[x])
        ys.append(row["accuracy"])
    return {
        "title": title,
        "x": f"{x} (tokens)" if x == "length" else x,
        "y": "accuracy",
        "shares": True,
        "log_x": True,
        "log_y": False,
        "series": series,
    }


# these suites set the model's modes themselves, so that the command line refuses mode options for them
BY_MODE: dict[str, Suite] = {
    "switch-perplexity": Suite(
        "loss by position around switches of the mode; offline",
        switch_suite,
        one_sequence(2048),
        ("lengths", "max_length", "text"),
    ),
    "cross-mode-mqar": Suite(
        "associative recall, pairs in one mode and queries in another; offline",
        cross_mqar_suite,
        reads=("lengths", "vocab_size"),
    ),
    "cross-mode-niah": Suite(
        "S-NIAH 1 to 3, haystack in one mode and question in another; offline",
        cross_niah_suite,
        lambda options: 1,
        ("lengths", "text"),
    ),
    "cross-mode-ruler-niah": Suite(
        "RULER's needles likewise, through lm-eval (Table 3)", cross_ruler_niah_suite, reads=LM_EVAL_READS
    ),
    "cross-mode-recall": Suite(
        "cloze recall, 97.5 % of the prompt in one mode, the rest in another (Table 3)",
        cross_recall_suite,
        reads=LM_EVAL_READS,
    ),
    **{
        f"isolated-{name}": isolated(name, suite, reads)
        for name, suite, reads in (
            ("perplexity-by-position", perplexity_suite, ("lengths", "max_length", "text")),
            ("mqar", mqar_suite, ("lengths", "vocab_size")),
            ("niah", niah_suite, ("lengths", "text")),
            ("ruler-niah", ruler_niah_suite, LM_EVAL_READS),
            ("commonsense", commonsense_suite, LM_EVAL_READS),
            ("language-modeling", language_modeling_suite, LM_EVAL_READS),
            ("recall", recall_suite, LM_EVAL_READS),
        )
    },
}
SUITES: dict[str, Suite] = {
    "language-modeling": Suite(
        "the seven tasks of Tables 1 and 9 and their average", language_modeling_suite, reads=LM_EVAL_READS
    ),
    "ruler-niah": Suite(
        "RULER's single needles of Table 2, at 2,048 tokens, through lm-eval", ruler_niah_suite, reads=LM_EVAL_READS
    ),
    **BY_MODE,
}
