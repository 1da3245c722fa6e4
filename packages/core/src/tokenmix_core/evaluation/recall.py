"""Recall of any causal language model: associative recall, copying of tokens, and needles in haystacks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn import functional as F
from tqdm import tqdm

from tokenmix_core.data.synthetic import (
    COPYING,
    IGNORE_INDEX,
    NIAH_TASKS,
    NiahExample,
    RecallExamples,
    copying,
    mqar,
    niah,
)
from tokenmix_core.evaluation import text
from tokenmix_core.evaluation.options import EvalOptions, Plot, Series, SuiteResult
from tokenmix_core.evaluation.parts import Parts
from tokenmix_core.evaluation.text import BUILT_IN_TEXT

MQAR_LENGTHS = (64, 128, 256, 512)
MQAR_PAIRS = (4, 8, 16, 32, 64, 128, 256, 512)
COPY_LENGTHS = (64, 128, 256)
COPY_TOKENS = (4, 8, 16, 32, 64, 128, 256, 512)
COPY_VOCABULARY = 64
# index of the first held-out example; training uses only lower indices
MQAR_HELD_OUT = COPY_HELD_OUT = 2**40
NIAH_LENGTHS = (1024, 2048, 4096)
_HAYSTACK_WORDS = 200_000


def score_recall(model: Any, examples: RecallExamples, *, batch_size: int = 8) -> tuple[float, float]:
    """Return the accuracy (fraction of scored positions whose most likely token is the label) and mean loss in nats.

    Raises:
        ValueError: tokens that lie outside the model's vocabulary, or no scored position.
    """
    accuracies, loss = _score_examples(model, examples, batch_size)
    scored = (examples.labels[:, 1:] != IGNORE_INDEX).sum(1).double()
    return float((torch.tensor(accuracies).nan_to_num() * scored).sum() / scored.sum()), loss


@torch.inference_mode()
def _score_examples(model: Any, examples: RecallExamples, batch_size: int) -> tuple[list[float], float]:
    """Return each example's accuracy (NaN if it has no scored position), and the mean loss of all scored positions."""
    size = text.text_vocab_size(model)
    if (top := int(examples.input_ids.max())) >= size:
        raise ValueError(f"token {top} does not lie in the model's vocabulary of {size}")
    accuracies: list[float] = []
    loss = count = 0.0
    for input_ids, labels in zip(*(x.split(batch_size) for x in examples), strict=True):
        logits = model(input_ids=input_ids.to(model.device), use_cache=False).logits[:, :-1]
        targets = labels[:, 1:].to(logits.device)
        scored = targets != IGNORE_INDEX
        right = (logits.argmax(-1) == targets) & scored
        accuracies += (right.sum(1) / scored.sum(1)).tolist()
        logits, targets = logits[scored].float(), targets[scored]
        loss += float(F.cross_entropy(logits, targets, reduction="sum"))
        count += len(targets)
    if not count:
        raise ValueError("score_recall: no position is scored")
    return accuracies, loss / count


def mqar_vocabulary(model: Any, options: EvalOptions) -> int:
    """Return the vocabulary size of the sequences: by default 8,192 as in Zoology, or the model's if smaller."""
    return options.vocab_size or min(8192, text.text_vocab_size(model))


def mqar_cases(model: Any, options: EvalOptions) -> dict[str, tuple[int, int]]:
    """Return the cases `(length, pairs)` of the suite by name, as far as lengths and vocabulary allow them.

    Raises:
        ValueError: lengths and vocabulary allow no case at all.
    """
    size, lengths = mqar_vocabulary(model, options), options.lengths or MQAR_LENGTHS
    most = min(size // 2 - 1, MQAR_PAIRS[-1])
    cases = {f"mqar-{t}-{p}": (t, p) for t in lengths for p in MQAR_PAIRS if p <= min(t // 4, most)}
    if not cases:
        least = MQAR_PAIRS[0]
        raise ValueError(
            f"mqar needs a length of at least {4 * least} and a vocabulary of at least {2 * least + 2} tokens, got "
            f"lengths {', '.join(map(str, lengths))} and {size} tokens"
        )
    return cases


def mqar_suite(model: Any, tokenizer: Any, options: EvalOptions) -> SuiteResult:
    """Measure multi-query associative recall by number of pairs, for each length (by default 64 to 512 tokens).

    "chance" is the accuracy of guessing one of the values in the context, 1 / pairs. Training never uses the indices of
    these examples.
    """
    size = mqar_vocabulary(model, options)

    def examples(count: int, case: _Case) -> RecallExamples:
        shape: dict[str, Any] = {"seq_len": case.length, "num_pairs": case.size, "vocab_size": size}
        return mqar(count, **shape, seed=options.seed, first=MQAR_HELD_OUT)

    cases = {
        name: _Case(name, f"{length} tokens", length, pairs, 1 / pairs)
        for name, (length, pairs) in mqar_cases(model, options).items()
    }
    names = _Names("mqar", "Multi-query associative recall", "pairs", "pairs", "queries")
    return _recall_suite(names, model, options, cases, examples, size)


def copying_suite(model: Any, tokenizer: Any, options: EvalOptions) -> SuiteResult:
    """Measure copying and selective copying by number of tokens, for each length (by default 64 to 256 tokens).

    The input contains the true tokens before each token to predict. "chance" is the accuracy of guessing one of the
    tokens to copy. Training never uses the indices of these examples.

    Raises:
        ValueError: every length is too short for even the smallest number of tokens to copy.
    """
    size, lengths = options.vocab_size or COPY_VOCABULARY, options.lengths or COPY_LENGTHS

    def examples(count: int, case: _Case) -> RecallExamples:
        shape: dict[str, Any] = {"seq_len": case.length, "num_tokens": case.size, "vocab_size": size}
        return copying(count, **shape, selective=COPYING[case.task], seed=options.seed, first=COPY_HELD_OUT)

    cases = {
        f"{kind}-{t}-{n}": _Case(kind, f"{kind}, {t} tokens", t, n, copying_chance(n, size))
        for kind in COPYING
        for t in lengths
        for n in COPY_TOKENS
        if n <= t // 4
    }
    if not cases:
        raise ValueError(f"copying needs a length of at least {4 * COPY_TOKENS[0]} tokens, got {max(lengths)}")
    names = _Names("copying", "Copying", "tokens", "tokens to copy", "scored")
    return _recall_suite(names, model, options, cases, examples, size)


def copying_chance(tokens: int, vocab_size: int) -> float:
    """Return the accuracy of guessing one of the tokens to copy; a token of equal value counts as right, too."""
    return 1 / tokens + (1 - 1 / tokens) / max(1, vocab_size - 2)


class _Case(NamedTuple):
    """A case in one table row: its length, its number of pairs or tokens to copy, and the accuracy of a guess."""

    task: str
    curve: str
    length: int
    size: int
    chance: float


class _Names(NamedTuple):
    """A suite's name, its plot's title and x label, and the names of the columns of size and of scored positions."""

    suite: str
    title: str
    sizes: str
    axis: str
    scored: str


def _recall_suite(
    names: _Names,
    model: Any,
    options: EvalOptions,
    cases: dict[str, _Case],
    examples: Callable[[int, _Case], RecallExamples],
    vocab_size: int,
) -> SuiteResult:
    limit, rows, parts = options.limit or 128, [], Parts()
    samples: list[list[float]] = []
    series: Series = {}
    chosen = options.choose(names.suite, tuple(cases))
    for name in tqdm(chosen, desc=names.suite, unit="task", disable=not options.progress):
        with parts.part(name):
            case = cases[name]
            # the mean over examples equals that over positions: all examples of a case have equally many
            accuracies, loss = _score_examples(model, examples(limit, case), options.batch_size or 32)
            accuracy = float(np.mean(accuracies))
            samples.append(accuracies)
            row = {"task": case.task, "length": case.length, names.sizes: case.size, "accuracy": accuracy}
            rows.append({**row, "chance": case.chance, "loss": loss, names.scored: limit * case.size})
            x, y = series.setdefault(case.curve, ([], []))
            x.append(case.size)
            y.append(accuracy)
    chances = {row[names.sizes]: row["chance"] for row in rows}
    series["chance"] = (sorted(chances), [chances[size] for size in sorted(chances)])
    about: Plot = {"title": names.title, "x": names.axis, "y": "accuracy", "series": series}
    plot: Plot = {**about, "log_x": True, "shares": True}
    settings = {"vocab_size": vocab_size, "seed": options.seed}
    result: SuiteResult = {"suite": names.suite, "settings": settings, "rows": rows, "plots": [plot]}
    return parts.result({**result, "samples": samples})


class NeedleScore(NamedTuple):
    """The result for one needle: whether greedy decoding produces its value, and the mean loss in nats of the value."""

    found: bool
    loss: float


def score_niah(
    model: Any, tokenizer: Any, examples: Sequence[NiahExample], *, batch_size: int = 8
) -> list[NeedleScore]:
    """Complete each prompt greedily, in left-padded batches; return whether the answer occurs, and its loss."""
    scores = []
    for start in range(0, len(examples), batch_size):
        batch = examples[start : start + batch_size]
        longest = max(len(tokenizer(" " + e.answer, add_special_tokens=False)["input_ids"]) for e in batch) + 8
        said = generate_text(model, tokenizer, [e.context + e.question for e in batch], max_new_tokens=longest)
        scores += [
            NeedleScore(e.answer in s, answer_loss(model, tokenizer, e)) for e, s in zip(batch, said, strict=True)
        ]
    return scores


def niah_examples(
    task: str, tokenizer: Any, length: int, count: int, *, haystack: Sequence[str] = (), seed: int = 0
) -> list[NiahExample]:
    """Return `count` needles at evenly spaced depths; prompt and answer together have at most `length` tokens."""

    def tokens(string: str) -> int:
        return len(tokenizer(string, verbose=False)["input_ids"])

    depths = [(i + 0.5) / count for i in range(count)]
    return [
        niah(task, max_tokens=length, count_tokens=tokens, depth=depth, haystack=haystack, seed=seed, index=i)
        for i, depth in enumerate(depths)
    ]


def niah_haystack(tasks: Sequence[str], options: EvalOptions, tokenizer: Any) -> list[str]:
    """Return the words of the running text in which tasks insert needles; empty if no task uses running text."""
    needs_text = any(NIAH_TASKS[task].haystack == "text" for task in tasks)
    return text.words(options.text, tokenizer, _HAYSTACK_WORDS) if needs_text else []


def niah_suite(model: Any, tokenizer: Any, options: EvalOptions) -> SuiteResult:
    """Measure S-NIAH 1 to 3: the fraction of needles whose value greedy decoding produces, by context length and depth.

    The lengths are 1,024 to 4,096 tokens by default. Each row is of one task and length, with needles at evenly spaced
    depths from 0 (start) to 1 (end of the haystack); a plot shows the accuracy by depth. While a model is being
    trained, `answer loss` falls long before the accuracy rises.
    """
    limit, batch_size = options.limit or 50, options.batch_size or 8
    tasks = options.choose("niah", tuple(NIAH_TASKS))
    parts = Parts()
    haystack = niah_haystack(tasks, options, tokenizer)
    rows = []
    samples: list[list[float]] = []
    by_length: Series = {}
    by_depth: Series = {}
    cases = [(task, length) for task in tasks for length in sorted(options.lengths or NIAH_LENGTHS)]
    found_at: dict[str, list[tuple[float, bool]]] = {task: [] for task in tasks}
    for task, length in tqdm(cases, desc="niah", unit="task", disable=not options.progress):
        with parts.part(f"{task} at {length:,} tokens"):
            examples = niah_examples(task, tokenizer, length, limit, haystack=haystack, seed=options.seed)
            scores = []
            with tqdm(total=limit, desc=f"{task}, {length} tokens", leave=False, disable=not options.progress) as shown:
                for start in range(0, limit, batch_size):
                    batch = examples[start : start + batch_size]
                    scores += score_niah(model, tokenizer, batch, batch_size=batch_size)
                    shown.update(len(batch))
            accuracy, loss = (float(np.mean(column)) for column in zip(*scores, strict=True))
            depths = [example.depth for example in examples]
            row = {"task": task, "length": length, "accuracy": accuracy, "answer loss": loss, "examples": limit}
            row |= {"least depth": min(depths), "mean depth": float(np.mean(depths)), "greatest depth": max(depths)}
            rows.append(row)
            samples.append([float(score.found) for score in scores])
            found_at[task] += [(e.depth, score.found) for e, score in zip(examples, scores, strict=True)]
            x, y = by_length.setdefault(task, ([], []))
            x.append(length)
            y.append(accuracy)
    for task, hits in ((task, hits) for task, hits in found_at.items() if hits):
        depth, found = np.array(hits).T
        tenth = np.minimum((depth * 10).astype(int), 9)
        present = np.unique(tenth)
        by_depth[task] = (((present + 0.5) / 10).tolist(), [float(found[tenth == t].mean()) for t in present])
    title = "Needle in a haystack"
    plots: list[Plot] = [
        {"title": title, "x": "context (tokens)", "y": "accuracy", "log_x": True, "shares": True, "series": by_length},
        {"title": title, "x": "depth", "y": "accuracy", "shares": True, "series": by_depth},
    ]
    settings: dict[str, Any] = {"seed": options.seed}
    if haystack:
        settings["haystack"] = options.text or BUILT_IN_TEXT
    return parts.result({"suite": "niah", "settings": settings, "rows": rows, "plots": plots, "samples": samples})


@torch.inference_mode()
def generate_text(model: Any, tokenizer: Any, prompts: list[str], *, max_new_tokens: int, **settings: Any) -> list[str]:
    """Return the decoded continuations of `prompts`, greedy unless `settings` for transformers' generation differ."""
    rows = [tokenizer(prompt, verbose=False)["input_ids"] for prompt in prompts]
    pad = next(i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id, 0) if i is not None)
    longest = max(map(len, rows))
    input_ids = torch.tensor([[pad] * (longest - len(row)) + row for row in rows], device=model.device)
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows], device=model.device)
    out = model.generate(
        input_ids=input_ids,
        attention_mask=mask,
        max_new_tokens=max_new_tokens,
        pad_token_id=pad,
        use_cache=True,
        **{"do_sample": False, **settings},
    )
    return tokenizer.batch_decode(out[:, longest:], skip_special_tokens=True)


@torch.inference_mode()
def answer_loss(model: Any, tokenizer: Any, example: NiahExample) -> float:
    """Return the mean loss, in nats, of the true answer's tokens after the prompt."""
    prompt = tokenizer(example.context + example.question, verbose=False)["input_ids"]
    answer = tokenizer(" " + example.answer, add_special_tokens=False)["input_ids"]
    input_ids = torch.tensor([prompt + answer], device=model.device)
    logits = model(input_ids=input_ids, use_cache=False, logits_to_keep=len(answer) + 1).logits[0, :-1]
    return float(F.cross_entropy(logits.float(), input_ids[0, -len(answer) :]))
