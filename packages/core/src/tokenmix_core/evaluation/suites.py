"""All suites by name, and the function that runs suites and writes their results."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tokenmix_core._utils.atomic_io import check_writable
from tokenmix_core.evaluation import text
from tokenmix_core.evaluation.copying import copy_needs, copy_suite
from tokenmix_core.evaluation.efficiency import BENCH_SUITES
from tokenmix_core.evaluation.harness import run_tasks
from tokenmix_core.evaluation.options import OPTIONAL, EvalOptions, Suite, SuiteResult, one_sequence
from tokenmix_core.evaluation.origin import provenance
from tokenmix_core.evaluation.parts import report_failure
from tokenmix_core.evaluation.perplexity import perplexity_suite
from tokenmix_core.evaluation.recall import copying_suite, generate_text, mqar_suite, niah_suite
from tokenmix_core.evaluation.report import format_rows, format_settings, write_result

# for each task, by lm-eval's name: the metric that enters the average, as in the papers
COMMONSENSE = {
    "wikitext": "word_perplexity",
    "lambada_openai": "acc",
    "piqa": "acc",
    "hellaswag": "acc_norm",
    "winogrande": "acc",
    "openbookqa": "acc_norm",
    "arc_easy": "acc",
    "arc_challenge": "acc_norm",
    "boolq": "acc",
    "sciq": "acc",
    "social_iqa": "acc",
}
_RECALL_TASKS = ("swde", "squad_completion", "fda", "recall_triviaqa", "recall_nq", "recall_drop")
RECALL: dict[str, str] = dict.fromkeys(_RECALL_TASKS, "contains")
RULER = (
    *(f"niah_single_{i}" for i in (1, 2, 3)),
    *(f"niah_multikey_{i}" for i in (1, 2, 3)),
    "niah_multivalue",
    "niah_multiquery",
    "ruler_vt",
    "ruler_cwe",
    "ruler_fwe",
    "ruler_qa_squad",
    "ruler_qa_hotpot",
)
RULER_LENGTHS = (4096,)
# LongBench-E: the data sets of LongBench whose examples have evenly spread lengths
LONGBENCH = tuple(
    f"longbench_{name}_e"
    for name in (
        "2wikimqa",
        "hotpotqa",
        "multifieldqa_en",
        "qasper",
        "multi_news",
        "gov_report",
        "trec",
        "triviaqa",
        "samsum",
        "lcc",
        "repobench-p",
    )
)
# the suite that is run if the command has --tasks but no --suite
LM_EVAL = "lm-eval"
_LONGBENCH_RANGES = ((0, 4000), (4000, 8000), (8000, sys.maxsize))


def commonsense_suite(model: Any, tokenizer: Any, options: EvalOptions) -> SuiteResult:
    """Evaluate zero-shot common sense and language modelling; WikiText's perplexity does not enter the average."""
    counted = [task for task in COMMONSENSE if task != "wikitext"]
    return run_tasks("commonsense", model, tokenizer, COMMONSENSE, options, average_over=counted)


def recall_suite(model: Any, tokenizer: Any, options: EvalOptions) -> SuiteResult:
    """Evaluate cloze questions on a passage: SWDE, SQuAD and FDA of lm-eval, and TriviaQA, NQ and DROP of `tasks/`.

    `max_length=2048` is the usual setting in papers. In lm-eval's three tasks, a longer prompt loses its beginning.
    """
    return run_tasks("recall", model, tokenizer, RECALL, options)


def ruler_suite(model: Any, tokenizer: Any, options: EvalOptions) -> SuiteResult:
    """Evaluate RULER's thirteen tasks at each context length (4,096 tokens by default)."""
    options = replace(options, lengths=options.lengths or RULER_LENGTHS)
    return run_tasks("ruler", model, tokenizer, dict.fromkeys(RULER, ""), options)


def longbench_suite(model: Any, tokenizer: Any, options: EvalOptions) -> SuiteResult:
    """Evaluate LongBench-E as a whole and by the input's length in words: below 4,000, 4,000 to 7,999, and more."""
    tasks = dict.fromkeys(LONGBENCH, "score")
    return run_tasks("longbench", model, tokenizer, tasks, options, by_sample=_longbench_ranges)


def lm_eval_suite(model: Any, tokenizer: Any, options: EvalOptions) -> SuiteResult:
    """Evaluate the tasks and groups of lm-eval that `options.tasks` names, with lm-eval's settings and no average.

    Raises:
        ValueError: `options.tasks` is empty, or names a task of RULER (use the suite `ruler`, which checks lengths).
    """
    if not options.tasks:
        raise ValueError("suite lm-eval runs the tasks that --tasks names, got none; `lm-eval ls tasks` lists all")
    if of_ruler := [task for task in options.tasks if task in ("ruler", *RULER)]:
        raise ValueError(f"{of_ruler[0]} needs context lengths; run it by: --suite ruler --tasks A,B --lengths T,T")
    return run_tasks(LM_EVAL, model, tokenizer, dict.fromkeys(options.tasks, ""), options, average_over=())


def _longbench_ranges(task: str, samples: list[dict[str, Any]], metric: str) -> list[dict[str, Any]]:
    rows = []
    for low, high in _LONGBENCH_RANGES:
        values = [float(s[metric]) for s in samples if low <= s["doc"]["length"] < high]
        if values:
            span = f"{low // 1000}k-{high // 1000}k" if high < sys.maxsize else f"from {low // 1000}k"
            rows.append(
                {
                    "task": task,
                    "metric": f"{metric}, {span} words",
                    "value": sum(values) / len(values),
                    "examples": len(values),
                }
            )
    return rows


def samples_suite(model: Any, tokenizer: Any, options: EvalOptions) -> SuiteResult:
    """Sample continuations of the first 200 characters of up to three held-out texts, or of `options.prompt`.

    The temperature is 0.8. A continuation has at most `options.max_length` (by default 256) tokens.
    """
    import torch

    options.choose("samples", ("samples",))
    if options.prompt is not None:
        prompts = [options.prompt]
    else:
        documents = itertools.islice(text.documents(options.text, tokenizer), min(3, options.limit or 3))
        prompts = [document[:200] for document in documents]
    with torch.random.fork_rng(devices=[model.device] if model.device.type == "cuda" else []):
        torch.manual_seed(options.seed)
        said = generate_text(
            model,
            tokenizer,
            prompts,
            max_new_tokens=options.max_length or 256,
            do_sample=True,
            temperature=0.8,
            top_k=0,
        )
    rows = [{"prompt": prompt, "continuation": s} for prompt, s in zip(prompts, said, strict=True)]
    settings = {"temperature": 0.8, "seed": options.seed}
    return {"suite": "samples", "settings": settings, "rows": rows, "plots": []}


# the options that every suite of lm-eval tasks reads
LM_EVAL_READS = ("lengths", "max_length", "include")
_TEXT_READS = ("lengths", "max_length", "text")
SUITES: dict[str, Suite] = {
    "commonsense": Suite(
        "common sense and WikiText, zero-shot, through lm-eval", commonsense_suite, reads=LM_EVAL_READS
    ),
    "recall": Suite(
        "recall from passages in cloze form (SWDE, SQuAD, FDA, TriviaQA, NQ, DROP)", recall_suite, reads=LM_EVAL_READS
    ),
    "ruler": Suite("RULER's thirteen long-context tasks, through lm-eval", ruler_suite, reads=LM_EVAL_READS),
    "longbench": Suite("LongBench-E, through lm-eval", longbench_suite, reads=LM_EVAL_READS),
    LM_EVAL: Suite("any tasks of lm-eval, by --tasks", lm_eval_suite, reads=LM_EVAL_READS),
    "mqar": Suite("multi-query associative recall; offline", mqar_suite, reads=("lengths", "vocab_size")),
    "copying": Suite(
        "copying and selective copying of tokens; offline", copying_suite, reads=("lengths", "vocab_size")
    ),
    "niah": Suite(
        "single needle in a haystack, S-NIAH 1 to 3; offline", niah_suite, lambda options: 1, ("lengths", "text")
    ),
    "perplexity-by-position": Suite(
        "loss on held-out text by position; offline", perplexity_suite, one_sequence(2048), _TEXT_READS
    ),
    "copy": Suite("loss on a passage's second copy by distance; offline", copy_suite, copy_needs, _TEXT_READS),
    "efficiency": BENCH_SUITES["efficiency"],
    "samples": Suite(
        "continuations of held-out text; offline",
        samples_suite,
        lambda o: int(o.prompt is None),
        ("max_length", "text", "prompt"),
    ),
}


def check_suites(names: Sequence[str], suites: Mapping[str, Suite]) -> None:
    """Raise a ValueError if a name is not one of the names of `suites`."""
    if unknown := [name for name in names if name not in suites]:
        raise ValueError(f"there is no suite {unknown[0]!r}; choose from {', '.join(suites)}")


def check_read(names: Sequence[str], options: EvalOptions, suites: Mapping[str, Suite]) -> None:
    """Check that each option in `OPTIONAL` that is set is read by at least one of the named suites.

    A suite whose `reads` is None may read every option.

    Raises:
        ValueError: an option is set that none of the named suites reads.
    """
    read = [reads for name in names if (reads := suites[name].reads) is not None]
    if len(read) < len(names):
        return
    for option in OPTIONAL:
        if getattr(options, option) is not None and not any(option in reads for reads in read):
            raise ValueError(f"{', '.join(names)} {'do' if len(names) > 1 else 'does'} not read {option}; leave it out")


def check_options(names: Sequence[str], tokenizer: Any, options: EvalOptions, suites: Mapping[str, Suite]) -> None:
    """Check, before a model is loaded, that there is enough text for the named suites.

    Raises:
        ValueError: a suite needs more held-out text than the text has, or the text cannot be read.
    """
    needed = {name: needs(options) for name in names if (needs := suites[name].needs) is not None}
    most = max(needed.values(), default=0)
    there = len(text.text_tokens(options.text, tokenizer, most)) if most else 0
    for name, tokens in needed.items():
        if there < tokens:
            source = options.text or text.BUILT_IN_TEXT
            raise ValueError(
                f"{name} needs {tokens:,} tokens of held-out text, and {source} has {there:,}; "
                "prepare it with a larger --held-out, evaluate at shorter lengths (--evaluation_lengths), or choose "
                "other evaluations (--evaluations, --no-eval)"
            )


class EvaluationsFailed(ValueError):
    """Some suites, or parts of a suite, have failed; the results of all others are written."""


def evaluate(
    model: Any,
    tokenizer: Any,
    names: Sequence[str],
    options: EvalOptions | Mapping[str, EvalOptions] | None = None,
    *,
    out: str | Path | None = None,
    suites: Mapping[str, Suite] = SUITES,
) -> dict[str, SuiteResult]:
    """Run suites on a model; print and write each result at once, so that a later failure loses nothing.

    If a suite fails, its error is printed, and the other suites still run.

    Args:
        model: any causal language model of transformers; it is in evaluation mode during the call. If it has a method
            `evaluation_settings`, the returned entries become part of every result's settings and rows.
        tokenizer: the model's tokenizer.
        names: names of the suites to run, in this order.
        options: options of all suites, or a dictionary of options by suite (others have the defaults).
        out: folder for JSON, plots and `report.md`; if None, nothing is written.
        suites: all known suites by name.

    Raises:
        EvaluationsFailed: some of several suites, or parts of a suite, have failed; raised after all others have run.
        ValueError: an unknown suite; or the only suite cannot run with these options.
        ImportError: the only suite needs a library that is not installed.
    """
    check_suites(names, suites)
    if out is not None:
        check_writable(Path(out))
    results: dict[str, SuiteResult] = {}
    failed: dict[str, Exception] = {}
    failed_parts: dict[str, Exception] = {}
    was_training = model.training
    model.eval()
    try:
        for name in names:
            chosen = options.get(name) if isinstance(options, Mapping) else options
            start = time.perf_counter()
            try:
                result = suites[name].run(model, tokenizer, chosen or EvalOptions())
                if not result["rows"]:
                    raise ValueError(f"{name} has no row: the options leave nothing to measure")
            except Exception as error:
                if len(names) == 1:
                    raise
                failed[name] = error
                report_failure(name, error)
                continue
            if parts := result.pop("failed", {}):
                for part, error in parts.items():
                    failed_parts[f"{name}, {part}"] = error
                    report_failure(f"{name}, {part}", error)
                result["settings"]["failed"] = {part: _reason(error) for part, error in parts.items()}
            # settings on which the model's answers depend besides its weights; the suite's own settings take precedence
            about = getattr(model, "evaluation_settings", dict)()
            result["settings"] = {**about, **result["settings"]}
            result["rows"] = [{**about, **row} for row in result["rows"]]
            result["settings"]["seconds"] = round(time.perf_counter() - start, 1)
            result["provenance"] = provenance(
                model, tokenizer, chosen or EvalOptions(), reads_text=suites[name].reads_text
            )
            results[name] = result
            print(f"\n{name}: {format_settings(result['settings'])}\n{format_rows(result['rows'])}", flush=True)
            if out is not None:
                files = write_result(result, Path(out))
                print(f"written: {', '.join(str(f) for f in files)}", flush=True)
    finally:
        model.train(was_training)
    messages = []
    if failed:
        told = "; ".join(f"{name}: {_reason(error)}" for name, error in failed.items())
        done = f"{', '.join(results)} ran" if results else "none ran"
        messages.append(f"{len(failed)} of {len(names)} evaluations failed ({told}); {done}")
    if failed_parts:
        told = "; ".join(f"{part}: {_reason(error)}" for part, error in failed_parts.items())
        messages.append(
            f"{len(failed_parts)} parts of evaluations failed ({told}); results of the other parts are kept"
        )
    if messages:
        raise EvaluationsFailed("; ".join(messages))
    return results


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__
