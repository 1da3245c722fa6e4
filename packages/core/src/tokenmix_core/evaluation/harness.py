"""Run tasks of lm-eval with a model object; all suites of published tasks use this adapter."""

from __future__ import annotations

import difflib
import json
import logging
import random
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tokenmix_core._utils.optional import install_command, require
from tokenmix_core._utils.trust import is_trusted
from tokenmix_core.evaluation import text
from tokenmix_core.evaluation.options import EvalOptions, Plot, Series, SuiteResult
from tokenmix_core.evaluation.parts import Parts

OWN_TASKS = Path(__file__).parent / "tasks"
_RULER_SEED = 1234


def run_tasks(
    suite: str,
    model: Any,
    tokenizer: Any,
    tasks: Mapping[str, str],
    options: EvalOptions,
    *,
    include: Sequence[str | Path] = (OWN_TASKS,),
    builtin: bool = True,
    average_over: Sequence[str] | None = None,
    few_shot: Mapping[str, int] | None = None,
    runs_code: bool = False,
    by_sample: Callable[[str, list[dict[str, Any]], str], list[dict[str, Any]]] | None = None,
) -> SuiteResult:
    """Run lm-eval's tasks, each separately and from the same seed, so that no result depends on the other tasks.

    If a task fails, the other tasks still run, and averages over tasks are left out.

    Args:
        suite: name of the suite in the result.
        tasks: maps lm-eval's name of a task to the metric of the task that enters averages. A group of tasks also gets
            rows of its own: for each metric that all of its tasks have, the mean over all examples.
        include: folders with further task files, in addition to `options.include`.
        builtin: whether to include lm-eval's own tasks.
        average_over: the tasks whose metrics are averaged; by default all, and no average for an empty sequence.
        few_shot: number of solved examples before a question, by task; for other tasks lm-eval's number.
        runs_code: whether tasks may run programs that the model wrote.
        by_sample: takes a task's name, its samples and its metric, and returns further rows.

    Raises:
        ImportError: lm-eval, or a library that a task needs, is not installed.
        ValueError: a task cannot be set up; if data can neither be found here nor downloaded, the message names it.
    """
    lm_eval = require("lm_eval", "eval")
    HFLM = require("lm_eval.models.huggingface", "eval").HFLM
    TaskManager = require("lm_eval.tasks", "eval").TaskManager
    # otherwise lm_eval logs several lines about each task
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    chosen = options.choose(suite, tuple(tasks))
    max_length = options.max_length
    if suite == "ruler":
        check_ruler(chosen, tokenizer, options.lengths or ())
        # RULER's lengths include the answer; without `max_length`, lm-eval would cut prompts at the model's training
        # length
        max_length = max_length or max(options.lengths or ())
    if absent := [folder for folder in options.include or () if not Path(folder).is_dir()]:
        raise ValueError(f"include must name folders with task files, and {absent[0]!r} is none")
    if options.include and not is_trusted():
        raise ValueError(
            f"task files can run Python code: read those in {', '.join(map(str, options.include))}, and if you trust "
            "them, give --trust-remote-code, too (in Python: `with tokenmix_core._utils.trust.trusting(True):`)"
        )
    limit = options.limit
    batch_size = options.batch_size or 8
    rows: list[dict[str, Any]] = []
    parts = Parts()
    with tempfile.TemporaryDirectory(prefix="tokenizer-") as folder:
        # save the tokenizer: tasks with several context lengths load it from a folder
        tokenizer.save_pretrained(folder)
        if not is_trusted():
            _remove_code(Path(folder))
        metadata: dict[str, Any] = {"tokenizer": folder}
        if options.lengths:
            metadata["max_seq_lengths"] = list(options.lengths)
        if options.max_length:
            metadata["max_length"] = options.max_length
        folders = [*include, *(options.include or ())]
        manager = TaskManager(include_path=[str(p) for p in folders], include_defaults=builtin, metadata=metadata)
        asked = load_tasks(manager, chosen)
        loaded = {name: task for tasks in asked.values() for name, task in tasks.items()}
        about: dict[str, Any] = {"batch_size": batch_size, "max_length": max_length}
        if (separator := text.document_separator(tokenizer)) is not None:
            about["prefix_token_id"] = separator
        lm = HFLM(pretrained=model, backend="causal", tokenizer=tokenizer, **about)
        for name, task in loaded.items():
            if options.progress:
                print(f"{suite}: {name}", file=sys.stderr, flush=True)
            with parts.part(name):
                output = lm_eval.simple_evaluate(
                    model=lm,
                    tasks=[task],
                    task_manager=manager,
                    limit=None if suite == "ruler" else limit,
                    samples={name: _first_of_each_length(task, limit)} if suite == "ruler" and limit else None,
                    num_fewshot=(few_shot or {}).get(name),
                    confirm_run_unsafe_code=runs_code,
                    batch_size=batch_size,
                    bootstrap_iters=1000,
                    log_samples=by_sample is not None,
                    random_seed=options.seed,
                    numpy_random_seed=options.seed,
                    torch_random_seed=options.seed,
                    fewshot_random_seed=options.seed,
                    verbosity=None,
                )
                found = _rows(name, output)
                if by_sample is not None:
                    found += by_sample(name, output["samples"][name], tasks[name])
                rows += found
    rows += _group_rows(rows, asked)
    # give no average after a failure: it would be that of an easier or harder suite
    if not parts.failed:
        averaged = chosen if average_over is None else average_over
        rows += _length_averages(rows) if suite == "ruler" else _average(rows, tasks, averaged)
    settings = {"limit": options.limit, "max_length": lm.max_length, "seed": options.seed}
    plots = [_plot_by_length(rows)] if suite == "ruler" else []
    return parts.result({"suite": suite, "settings": settings, "rows": rows, "plots": plots})


def _remove_code(folder: Path) -> None:
    """Remove references to Python code from a saved tokenizer: lm-eval loads it with `trust_remote_code=True`."""
    path = folder / "tokenizer_config.json"
    fields = json.loads(path.read_text(encoding="utf-8"))
    if fields.pop("auto_map", None) is not None:
        path.write_text(json.dumps(fields), encoding="utf-8")


def load_tasks(manager: Any, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the task objects of each task or group, with their data, all built from the same seed.

    Raises:
        ImportError: a library that a task needs is not installed.
        ValueError: unknown tasks, or data that cannot be downloaded; the message names all of them.
    """
    if unknown := [name for name in names if name not in manager.all_tasks]:
        near = difflib.get_close_matches(unknown[0], manager.all_tasks, n=3)
        hint = f"; the nearest to {unknown[0]} are {', '.join(near)}" if near else ""
        raise ValueError(f"lm-eval has no task {', '.join(unknown)}{hint}")
    loaded: dict[str, dict[str, Any]] = {}
    missing: dict[str, str] = {}
    for name in names:
        random.seed(_RULER_SEED)
        try:
            with _offline(bool(missing)):
                loaded[name] = manager.load([name])["tasks"]
        except ImportError as error:
            raise ImportError(
                f"{name} needs a library that is not installed ({error.name or 'see lm-eval'}); install all that "
                f"lm-eval's tasks need with: {install_command('lm-eval[ifeval,longbench,ruler]')}"
            ) from error
        except OSError as error:
            # all network errors of datasets, huggingface_hub and requests are subclasses of OSError
            missing[name] = _what_is_missing(name, error)
    if missing:
        rest = f"; what needs none of it: --tasks {','.join(loaded)}" if loaded else ""
        raise ValueError(
            f"data that is not on this machine cannot be reached: {', '.join(dict.fromkeys(missing.values()))} (for "
            f"{', '.join(missing)}); run the same command once with a network, or copy the folder HF_HOME from a "
            f"machine that did and set HF_HUB_OFFLINE=1{rest}"
        )
    return loaded


def _what_is_missing(task: str, error: OSError) -> str:
    found = re.search(r"(?:[Dd]ataset|reach) '?([\w.-]+/[\w.-]+)'?", str(error)) or re.search(
        r"host='([^']+)'", str(error)
    )
    what = found.group(1) if found else str(error).strip().splitlines()[0][:200]
    return f"{what} and NLTK's punkt_tab" if "essays" in what else what


@contextmanager
def _offline(wanted: bool) -> Iterator[None]:
    """Context manager: if `wanted`, hub clients fail at once; otherwise each one tries for half a minute."""
    if not wanted:
        yield
        return
    from datasets import config
    from huggingface_hub import constants

    before = config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE
    config.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE = before


def check_ruler(tasks: Sequence[str], tokenizer: Any, lengths: Sequence[int]) -> None:
    """Raise a ValueError for lengths so short that RULER's generators of prompts would never end.

    Raises:
        ValueError: no lengths, a length below a task's shortest prompt, or a tokenizer whose tokens are too short.
    """

    def count(string: str) -> int:
        return len(tokenizer(string, verbose=False)["input_ids"])

    if not lengths:
        raise ValueError("ruler needs context lengths, got none")
    if "ruler_vt" in tasks:
        vt = require("lm_eval.tasks.ruler.vt_utils", "eval")
        needed = count(vt.generate_input_output(5, 1, 4, is_icl=True)[0]) + 40
        if needed > 500:
            raise ValueError(
                f"ruler_vt begins with an example of at most 500 tokens, and this tokenizer needs {needed} for it; "
                f"choose the other tasks: {', '.join(t for t in tasks if t != 'ruler_vt') or 'none is left'}"
            )
    if "ruler_cwe" in tasks:
        cwe = require("lm_eval.tasks.ruler.cwe_utils", "eval")
        for length in lengths:
            needed = count(cwe.generate_input_output(10, length)[1]) + 160
            if needed > length:
                raise ValueError(f"ruler_cwe at {length} tokens needs at least {needed} with this tokenizer")
    if min(lengths) < 512:
        raise ValueError(f"ruler needs lengths of at least 512 tokens, got {min(lengths)}")


def _first_of_each_length(task: Any, limit: int) -> list[int]:
    seen: Counter[int] = Counter()
    chosen = []
    for i, doc in enumerate(task.eval_docs):
        seen[doc["max_length"]] += 1
        if seen[doc["max_length"]] <= limit:
            chosen.append(i)
    return chosen


def _rows(task: str, output: dict[str, Any]) -> list[dict[str, Any]]:
    rows = []
    samples = output.get("n-samples", {}).get(task, {}).get("effective")
    for key, value in output["results"][task].items():
        metric, _, filtered = key.partition(",")
        if not filtered or metric.endswith("_stderr") or not isinstance(value, int | float):
            continue
        # skip the value −1, which RULER gives for lengths that were not requested
        if metric.isdigit() and value == -1:
            continue
        error = output["results"][task].get(f"{metric}_stderr,{filtered}")
        name = metric if filtered == "none" else f"{metric} ({filtered})"
        row = {"task": task, "metric": name, "value": float(value)}
        row["stderr"] = float(error) if isinstance(error, int | float) else None
        rows.append({**row, "examples": samples})
    return rows


def _group_rows(rows: list[dict[str, Any]], asked: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    found = []
    for group, tasks in asked.items():
        members = [row for row in rows if row["task"] in tasks]
        for metric in dict.fromkeys(row["metric"] for row in members if group not in tasks):
            part = [row for row in members if row["metric"] == metric]
            examples = sum(row["examples"] for row in part)
            if len(part) == len(tasks):
                value = sum(row["value"] * row["examples"] for row in part) / examples
                found.append({"task": group, "metric": metric, "value": value, "stderr": None, "examples": examples})
    return found


def _average(rows: list[dict[str, Any]], tasks: Mapping[str, str], names: Sequence[str]) -> list[dict[str, Any]]:
    values = [r["value"] for r in rows if r["task"] in names and r["metric"] == tasks[r["task"]]]
    if len(values) < 2:
        return []
    return [{"task": "average", "metric": f"{len(values)} tasks", "value": sum(values) / len(values)}]


def _length_averages(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    lengths = sorted({int(r["metric"]) for r in rows})
    values = {length: [r["value"] for r in rows if int(r["metric"]) == length] for length in lengths}
    return [{"task": "average", "metric": str(n), "value": sum(v) / len(v)} for n, v in values.items()]


def _plot_by_length(rows: list[dict[str, Any]]) -> Plot:
    series: Series = {}
    for row in rows:
        x, y = series.setdefault(row["task"], ([], []))
        x.append(int(row["metric"]))
        y.append(row["value"])
    return {"title": "RULER", "x": "context (tokens)", "y": "score", "log_x": True, "shares": True, "series": series}
