"""The tasks, on which everybody is trained and measured: one recipe each, the same for all but for the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from arena.contestants import CONTESTANTS, Contestant, recipe_of
from arena.sizes import Size
from tokenmix_core.evaluation.copying import copy_suite
from tokenmix_core.evaluation.options import EvalOptions, Suite
from tokenmix_core.evaluation.recall import copying_suite
from tokenmix_core.evaluation.suites import SUITES
from tokenmix_core.recipes import BYTE_VOCAB
from tokenmix_core.synthetic import COPYING, NIAH_TASKS
from tokenmix_core.training.recipe import DataRecipe, OptimizerRecipe, Recipe, RunRecipe, Tokens
from tokenmix_oryx.evals import BY_MODE, isolated

MQAR, COPY, NEEDLE, TEXT = "mqar", "copying", "niah", "text"


@dataclass(frozen=True)
class Task:
    """One thing to learn, and the suites that measure it.

    Attributes:
        name: on the command line and in the names of files.
        title: in tables and pictures.
        vocabulary: of the model.
        data: the training rows; the data's seed is the run's.
        suites: of core, by name, with the options that they get.
    """

    name: str
    title: str
    vocabulary: Callable[[Size], int]
    data: Callable[[Size], DataRecipe]
    suites: Callable[[Size], Mapping[str, EvalOptions]]


def _options(size: Size, **options: Any) -> EvalOptions:
    return EvalOptions(**{"limit": size.examples, "progress": False, **options})


def _copy_tokens(size: Size) -> int:
    return size.seq_len // 4


TASKS = {
    task.name: task
    for task in (
        Task(
            MQAR,
            "Associative recall",
            lambda s: max(s.words, BYTE_VOCAB),
            lambda s: DataRecipe(
                sources=["mqar"],
                seq_len=s.seq_len,
                # as many as words and row have room for
                mqar_pairs=min(s.seq_len // 4, s.words // 4),
                mqar_vocab_size=s.words,
                mqar_ramp=s.ramp,
            ),
            lambda s: {"mqar": _options(s, lengths=(s.seq_len,), vocab_size=s.words)},
        ),
        Task(
            COPY,
            "Copying",
            lambda s: BYTE_VOCAB,
            lambda s: DataRecipe(
                sources=list(COPYING),
                seq_len=s.seq_len,
                copy_tokens=_copy_tokens(s),
                copy_vocab_size=64,
                mqar_ramp=s.ramp,
            ),
            lambda s: {"copying": _options(s, lengths=(s.seq_len,), vocab_size=64)},
        ),
        Task(
            NEEDLE,
            "Needle in text",
            lambda s: BYTE_VOCAB,
            lambda s: DataRecipe(sources=list(NIAH_TASKS), seq_len=s.needle_len, mqar_ramp=s.ramp),
            lambda s: {"niah": _options(s, lengths=(s.needle_len,), batch_size=64)},
        ),
        Task(
            TEXT,
            "Text",
            lambda s: BYTE_VOCAB,
            # sequences that are read beyond T are cut from running text, too
            lambda s: DataRecipe(sources=["stdlib"], seq_len=s.seq_len, documents="joined"),
            lambda s: {
                "perplexity-by-position": _options(s, lengths=(s.reach * s.seq_len,)),
                "copy": _options(s, lengths=(s.seq_len,)),
            },
        ),
    )
}
# by core's name, what measures a model with modes instead, in each of them and across switches
BY_MODES: dict[str, tuple[str, ...]] = {
    "mqar": ("cross-mode-mqar",),
    "copying": ("isolated-copying",),
    "niah": ("cross-mode-niah",),
    "perplexity-by-position": ("isolated-perplexity-by-position", "switch-perplexity"),
    "copy": ("isolated-copy",),
}
ARENA_SUITES: dict[str, Suite] = {
    **SUITES,
    **BY_MODE,
    "isolated-copying": isolated("copying", copying_suite),
    "isolated-copy": isolated("copy", copy_suite),
}


def recipe(name: str, division: str, task: str, size: Size, rate: float, seed: int) -> Recipe:
    """The run of a contestant: what differs from the others' is the model, and what its package adds to its training.

    Weights and rows are drawn from the seed, so that everybody reads the same rows in the same order at a seed.
    """
    what = TASKS[task]
    data = replace(what.data(size), data_seed=seed)
    base = Recipe(
        name=f"arena-{size.name}-{division}-{name}-{task}",
        description=f"{what.title} in the arena",
        model={
            "vocab_size": what.vocabulary(size),
            "max_position_embeddings": max(size.reach * size.seq_len, 2 * size.needle_len),
            "initializer_range": size.deviation,
        },
        data=data,
        optimizer=OptimizerRecipe(
            total_tokens=Tokens(size.steps * size.batch_tokens),
            warmup_tokens=Tokens(size.steps // 20 * size.batch_tokens),
            batch_tokens=Tokens(size.batch_tokens),
            micro_batch_tokens=Tokens(size.batch_tokens),
            learning_rate=rate,
            min_learning_rate=rate / 20,
        ),
        run=RunRecipe(
            seed=seed,
            dataloader_num_workers=size.readers,
            logging_steps=max(1, size.steps // 100),
            # at the end alone: a piece that has to stop saves itself
            save_steps=size.steps,
            save_total_limit=1,
        ),
    )
    return recipe_of(CONTESTANTS[name], division, size, base)


def suites(contestant: Contestant, task: str, size: Size) -> dict[str, EvalOptions]:
    """The suites that measure a contestant on a task, with their options."""
    chosen = {}
    for name, options in TASKS[task].suites(size).items():
        for suite in BY_MODES[name] if contestant.modes else (name,):
            # switches are between chunks of training rows
            at = (size.seq_len,) if suite == "switch-perplexity" else options.lengths
            chosen[suite] = replace(options, lengths=at)
    return chosen
