"""Suites of the tasks by which the paper evaluates converted language models (Tables 3, 4 and 9); lm-eval runs them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tokenmix_core.evaluation import LM_EVAL_READS, EvalOptions, Suite, SuiteResult, run_tasks

_SUBJECTS = """
abstract_algebra anatomy astronomy business_ethics clinical_knowledge college_biology college_chemistry
college_computer_science college_mathematics college_medicine college_physics computer_security conceptual_physics
econometrics electrical_engineering elementary_mathematics formal_logic global_facts high_school_biology
high_school_chemistry high_school_computer_science high_school_european_history high_school_geography
high_school_government_and_politics high_school_macroeconomics high_school_mathematics high_school_microeconomics
high_school_physics high_school_psychology high_school_statistics high_school_us_history high_school_world_history
human_aging human_sexuality international_law jurisprudence logical_fallacies machine_learning management marketing
medical_genetics miscellaneous moral_disputes moral_scenarios nutrition philosophy prehistory professional_accounting
professional_law professional_medicine professional_psychology public_relations security_studies sociology
us_foreign_policy virology world_religions
"""
# MMLU's subjects as lm-eval names them
MMLU = tuple(f"mmlu_{subject}" for subject in _SUBJECTS.split())
# the paper does not state the number of shots; with five, its scores of Llama-3-8B and other models are reproduced
MMLU_SHOTS = 5
# the columns of the paper's Tables 3 and 9, each with the metric that enters the average
UNDERSTANDING = {
    "arc_easy": "acc",
    "arc_challenge": "acc_norm",
    "hellaswag": "acc_norm",
    "lambada_openai": "acc",
    "piqa": "acc",
    "winogrande": "acc",
    "mmlu": "acc",
}
# the tasks in the right half of the paper's Table 4; its scores are fractions of GPQA's 448 main questions and, for
# IFEval, of 834 instructions
KNOWLEDGE = {
    "gpqa_main_zeroshot": "acc",
    "ifeval": "inst_level_strict_acc",
    "humaneval": "pass@1 (create_test)",
    "mathqa": "acc",
    "mmlu": "acc",
}
ALLOW_CODE = "HF_ALLOW_CODE_EVAL"


def understanding_suite(model: Any, tokenizer: Any, options: EvalOptions) -> SuiteResult:
    """Run common-sense tasks and MMLU, with the paper's averages of Table 3 and, without LAMBADA, of Table 9."""
    without_lambada = {task: metric for task, metric in UNDERSTANDING.items() if task != "lambada_openai"}
    averages = {"Table 3": UNDERSTANDING, "Table 9": without_lambada}
    return _suite("understanding", UNDERSTANDING, averages, model, tokenizer, options)


def knowledge_suite(model: Any, tokenizer: Any, options: EvalOptions) -> SuiteResult:
    """Run GPQA, IFEval, HumanEval, MathQA and MMLU, with the average of the paper's Table 4.

    Raises:
        ValueError: HumanEval, which runs programs written by the model, is selected but HF_ALLOW_CODE_EVAL is not 1.
    """
    return _suite("knowledge", KNOWLEDGE, {"Table 4": KNOWLEDGE}, model, tokenizer, options)


def _suite(
    name: str,
    tasks: Mapping[str, str],
    averages: Mapping[str, Mapping[str, str]],
    model: Any,
    tokenizer: Any,
    options: EvalOptions,
) -> SuiteResult:
    chosen = options.choose(name, tuple(tasks))
    runs_code = "humaneval" in chosen
    if runs_code and os.environ.get(ALLOW_CODE) != "1":
        raise ValueError(
            f"humaneval runs the programs that the model writes: set {ALLOW_CODE}=1 to let it, best in a container, "
            f"or leave it out: --tasks {','.join(task for task in chosen if task != 'humaneval') or 'OTHERS'}"
        )
    parts: dict[str, str] = {}
    for task in chosen:
        parts |= dict.fromkeys(MMLU, "acc") if task == "mmlu" else {task: tasks[task]}
    result = run_tasks(
        name,
        model,
        tokenizer,
        parts,
        replace(options, tasks=None),
        average_over=(),
        few_shot=dict.fromkeys(MMLU, MMLU_SHOTS),
        runs_code=runs_code,
    )
    rows = _with_mmlu(result["rows"])
    values = {(row["task"], row["metric"]): row["value"] for row in rows}
    for table, columns in averages.items():
        if set(columns) <= set(chosen):
            mean = sum(values[column] for column in columns.items()) / len(columns)
            rows.append({"task": "average", "metric": f"{len(columns)} tasks of {table}", "value": mean})
    settings = {**result["settings"]} | ({"MMLU's examples before a question": MMLU_SHOTS} if "mmlu" in chosen else {})
    return {**result, "settings": settings, "rows": rows}


def _with_mmlu(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Replace the rows of MMLU's subjects by a single row with the mean over all questions."""
    subjects = [row for row in rows if row["task"] in MMLU and row["metric"] == "acc"]
    rest = [row for row in rows if row["task"] not in MMLU]
    if not subjects:
        return rest
    count = sum(row["examples"] for row in subjects)
    value = sum(row["value"] * row["examples"] for row in subjects) / count
    # standard error of a fraction of correct answers, for independent questions
    error = (value * (1 - value) / (count - 1)) ** 0.5 if count > 1 else None
    return [*rest, {"task": "mmlu", "metric": "acc", "value": value, "stderr": error, "examples": count}]


SUITES: dict[str, Suite] = {
    "understanding": Suite(
        "common sense and MMLU, through lm-eval (Tables 3 and 9)", understanding_suite, reads=LM_EVAL_READS
    ),
    "knowledge": Suite(
        "GPQA, IFEval, HumanEval, MathQA and MMLU, through lm-eval (Table 4)", knowledge_suite, reads=LM_EVAL_READS
    ),
}
