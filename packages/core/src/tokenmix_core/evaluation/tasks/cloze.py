"""Natural Questions, TriviaQA and DROP as cloze tasks for base models (Arora et al. 2024, "Just read twice").

The prompt is a passage, a full stop, and the beginning of a sentence that the answer completes. A model is right if its
completion, up to the end of the line and at most 48 tokens, contains one of the answers, in upper or lower case.

If the task's metadata has `max_length`, passages are cut so that prompt and answer fit, as in the benchmark: Natural
Questions keep the text around the answer, TriviaQA and DROP the beginning.
"""

from __future__ import annotations

import re
from typing import Any

# number of tokens that the benchmark reserves for an answer
ANSWER_TOKENS = 50
_MARKS = re.compile(r"\[(?:PAR|DOC|TLE)\]")


def nq(**metadata: Any) -> dict[str, Any]:
    """Return Natural Questions with passages of 2,048 tokens."""
    return _load("hazyresearch/based_nq_2048", around_answer=True, metadata=metadata)


def triviaqa(**metadata: Any) -> dict[str, Any]:
    """Return TriviaQA with its evidence from the web."""
    return _load("hazyresearch/based_triviaqa", around_answer=False, metadata=metadata)


def drop(**metadata: Any) -> dict[str, Any]:
    """Return DROP with its passages from Wikipedia."""
    return _load("hazyresearch/based_drop", around_answer=False, metadata=metadata)


def _load(name: str, *, around_answer: bool, metadata: dict[str, Any]) -> dict[str, Any]:
    from datasets import load_dataset
    from transformers import AutoTokenizer

    from tokenmix_core._utils.trust import from_pretrained

    # this is safe: datasets from version 4 on runs no code of a repository
    rows = load_dataset(name, split="validation")
    if max_length := metadata.get("max_length"):
        tokenizer = from_pretrained(AutoTokenizer, metadata["tokenizer"])
        rows = rows.map(lambda row: cut(row, tokenizer, max_length, around_answer=around_answer))
    return {"validation": rows}


def cut(row: dict[str, Any], tokenizer: Any, max_length: int, *, around_answer: bool) -> dict[str, Any]:
    """Return `row` with its passage cut, so that the prompt has at most `max_length − 50` tokens.

    The passage keeps the part around the answer if `around_answer`, else its beginning.

    Raises:
        ValueError: the question without any passage is already longer.
    """
    passage = _passage(row)
    question = len(tokenizer(". " + row["question"].strip())["input_ids"])
    budget = max_length - ANSWER_TOKENS - question
    if budget < 1:
        raise ValueError(
            f"max_length={max_length} is too short for a passage beside a question of {question} tokens and an "
            f"answer of {ANSWER_TOKENS}"
        )
    spans = tokenizer(passage, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    if len(spans) <= budget:
        return row
    first = 0
    if around_answer and (found := re.search(re.escape(_answers(row)[0]), passage, re.IGNORECASE)):
        middle = sum(1 for _, end in spans if end <= found.start())
        first = min(max(0, middle - budget // 2), len(spans) - budget)
    # cut the text by character positions: decoding the remaining tokens could change the text
    return {**row, "context": passage[spans[first][0] : spans[first + budget - 1][1]]}


def _passage(row: dict[str, Any]) -> str:
    passage, question = _MARKS.sub("", row["context"]).strip(), row["question"].strip()
    while question and passage.lower().endswith(question.lower()):
        passage = passage[: -len(question)].strip()
    return passage


def _answers(row: dict[str, Any]) -> list[str]:
    return list(row["answers"]) or ["unanswerable"]


def prompt(row: dict[str, Any]) -> str:
    """Return the prompt: the passage, and the beginning of the sentence that the answer completes."""
    return f"{_passage(row).strip('.')}. {row['question'].strip()}"


def first_answer(row: dict[str, Any]) -> str:
    """Return the first of the accepted answers, for logs."""
    return " " + _answers(row)[0]


def contains(row: dict[str, Any], results: list[str]) -> dict[str, float]:
    """lm-eval's metric: return 1 if the completion contains one of the accepted answers, else 0."""
    said = results[0].lower()
    return {"contains": float(any(answer.lower() in said for answer in _answers(row)))}
