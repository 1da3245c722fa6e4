"""Recall in cloze form: the model completes names that held-out code defines earlier and no training text contains."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn import functional as F
from tqdm import tqdm

from arena.names import NAMES, Name
from tokenmix_core.data.token_file import TokenFile
from tokenmix_core.data.tokenizer import tokenizer_fingerprint
from tokenmix_core.evaluation import EvalOptions, SuiteResult
from tokenmix_oryx.evals import crossed

# minimum distances, in tokens, between a name's definition and its use, by which questions are grouped
DISTANCES = (64, 256, 1024, 4096)
# number of tokens before the name that the model also reads alone, without the definition, to measure how often it
# guesses the name
_NEAR = 32
_WORD = re.compile(r"[A-Za-z_]\w*")


class Question(NamedTuple):
    """A name in held-out code that the model must complete.

    Attributes:
        group: index in `DISTANCES` of the question's group.
        tokens: the text up to the end of the name.
        name: index of the first token of the name.
        answer: index of the first token to predict; the tokens of the name before it distinguish it from all earlier
            names.
    """

    group: int
    tokens: list[int]
    name: int
    answer: int


def questions(text: Path, tokenizer: Any, length: int, limit: int) -> list[Question]:
    """Return at most `limit` questions for each distance in `DISTANCES`; a question has at most `length` tokens.

    Raises:
        ValueError: the corpus has no file of names.
    """
    path = text.parent / NAMES
    if not path.is_file():
        raise ValueError(f"{text} has no {NAMES} beside it; build it with `python -m arena corpus`")
    file = TokenFile(text, "held_out", fingerprint=tokenizer_fingerprint(tokenizer))
    found: list[list[Question]] = [[] for _ in DISTANCES]
    for question in _questions(file, tokenizer, length, [Name(*entry) for entry in json.loads(path.read_text())]):
        if len(found[question.group]) < limit:
            found[question.group].append(question)
        elif all(len(group) >= limit for group in found):
            break
    return [question for group in found for question in group]


def _questions(file: TokenFile, tokenizer: Any, length: int, names: list[Name]) -> Iterator[Question]:
    index, text = -1, ""
    for name in names:
        if name.document != index:
            index = name.document
            text = tokenizer.decode(file.document(index)[:-1])
        end = name.used + len(name.name)
        encoded = tokenizer(text[:end], add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        tokens, offsets = encoded["input_ids"], np.array(encoded["offset_mapping"])
        defined, used = (int(np.searchsorted(offsets[:, 1], at, side="right")) for at in (name.defined, name.used))
        first = max(0, len(tokens) - length)
        group = int(np.searchsorted(DISTANCES, used - defined, side="right")) - 1
        if group < 0 or defined <= first:
            continue
        words = {word for word in _WORD.findall(text[: name.used]) if word != name.name}
        answer = used + 1
        while answer < len(tokens) and _shared(text[name.used : offsets[answer - 1, 1]], words):
            answer += 1
        if len(tokens) - answer >= 2:
            yield Question(group, tokens[first:], used - first, answer - first)


def _shared(beginning: str, words: set[str]) -> bool:
    return any(word.startswith(beginning) for word in words)


@torch.inference_mode()
def complete(model: Any, tokens: list[int], answer: int) -> tuple[bool, float]:
    """Return whether greedy decoding predicts the tokens from index `answer` on, and their mean loss in nats."""
    ids = torch.tensor([tokens], device=model.device)
    targets = ids[0, answer:]
    logits = model(input_ids=ids, use_cache=False, logits_to_keep=len(targets) + 1).logits[0, :-1].float()
    return bool((logits.argmax(-1) == targets).all()), float(F.cross_entropy(logits, targets))


def _suite(name: str, model: Any, tokenizer: Any, options: EvalOptions, modes: Mapping[str, Any]) -> SuiteResult:
    if options.text is None:
        raise ValueError(f"{name} needs a corpus of `python -m arena corpus`, got none; name its tokens with text")
    length, limit = options.one_length(name, 8192), options.limit or 64
    asked = questions(Path(options.text), tokenizer, length, limit)
    rows: list[dict[str, Any]] = []
    samples: list[list[float]] = []
    for mode, schedule in modes.items():
        scores: list[list[tuple[bool, float, bool]]] = [[] for _ in DISTANCES]
        for question in tqdm(asked, desc=f"{name} {mode}", unit="name", disable=not options.progress):
            near = max(0, question.name - _NEAR)
            selected: Any = nullcontext()
            if schedule is not None:
                context, prompt = schedule
                selected = model.modes([(0, context), (question.name, prompt)])
            with selected:
                found, loss = complete(model, question.tokens, question.answer)
            with nullcontext() if schedule is None else model.modes(schedule[1]):
                guessed, _ = complete(model, question.tokens[near:], question.answer - near)
            scores[question.group].append((found, loss, guessed))
        for least, group in zip(DISTANCES, scores, strict=True):
            if group:
                accuracy, loss, guessed = np.mean(group, 0).tolist()
                row = {"task": "names", "distance": least, "accuracy": accuracy, "answer loss": loss}
                row |= {"without definition": guessed, "examples": len(group)}
                rows.append(row | ({"modes": mode} if mode else {}))
                samples.append([float(found) for found, _, _ in group])
    settings = {"length": length, "text": options.text}
    return {"suite": name, "settings": settings, "rows": rows, "plots": [], "samples": samples}


def names_suite(model: Any, tokenizer: Any, options: EvalOptions) -> SuiteResult:
    """Measure, by distance from the definition, the fraction of names that greedy decoding completes."""
    return _suite("names", model, tokenizer, options, {"": None})


def cross_mode_names_suite(model: Any, tokenizer: Any, options: EvalOptions) -> SuiteResult:
    """Measure the same as `names_suite` for each pair of Oryx' modes: one for the code, one for the name."""
    modes = {name: (context, prompt) for name, context, prompt in crossed()}
    return _suite("cross-mode-names", model, tokenizer, options, modes)
