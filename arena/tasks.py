"""The tasks: training data and evaluation suites, which are the same for all contestants."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from arena import corpus
from arena.cloze import cross_mode_names_suite, names_suite
from arena.contestants import CONTESTANTS, Contestant
from arena.corpus import CORPUS, VOCABULARY
from arena.models import with_model
from arena.sizes import Size
from tokenmix_core.data.synthetic import COPYING, NIAH_TASKS
from tokenmix_core.evaluation.copying import copy_suite
from tokenmix_core.evaluation.options import EvalOptions, Suite, SuiteResult
from tokenmix_core.evaluation.recall import COPY_VOCABULARY, copying_suite
from tokenmix_core.evaluation.suites import SUITES
from tokenmix_core.training.baselines import BYTE_VOCAB
from tokenmix_core.training.recipe import DataRecipe, OptimizerRecipe, Recipe, RunRecipe
from tokenmix_lte.mixer import Lte
from tokenmix_oryx.evals import BY_MODE, isolated

MQAR, COPY, NEEDLE, TEXT = "mqar", "copying", "niah", "text"


@dataclass(frozen=True)
class Task:
    """A task, with the suites that evaluate models trained on it.

    Attributes:
        name: name on the command line and in files.
        title: name in tables and plots.
        vocabulary: function of a size that returns the model's vocabulary size.
        data: function of a size that returns the training data; their seed is that of the run.
        suites: function of a size that returns options of core's suites, by name of the suite.
    """

    name: str
    title: str
    vocabulary: Callable[[Size], int]
    data: Callable[[Size], DataRecipe]
    suites: Callable[[Size], Mapping[str, EvalOptions]]


def _options(size: Size, **options: Any) -> EvalOptions:
    return EvalOptions(**{"limit": size.examples, "progress": False, **options})


def _text(size: Size) -> str | None:
    return CORPUS if size.corpus else None


def _retrieval(size: Size) -> dict[str, EvalOptions]:
    """Return the options of the suites for zero-shot retrieval, by name of the suite."""
    return {
        "niah": _options(size, lengths=size.retrieval_lengths, text=CORPUS),
        "names": _options(size, lengths=size.retrieval_lengths[-1:], text=CORPUS),
    }


def _copy_tokens(size: Size) -> int:
    return size.seq_len // 4


TASKS = {
    task.name: task
    for task in (
        Task(
            MQAR,
            "Associative recall",
            lambda s: max(s.recall_vocab_size, BYTE_VOCAB),
            lambda s: DataRecipe(
                sources=["mqar"],
                seq_len=s.seq_len,
                # the largest number of pairs that fits into a row and into the vocabulary
                mqar_pairs=min(s.seq_len // 4, s.recall_vocab_size // 4),
                mqar_vocab_size=s.recall_vocab_size,
                mqar_ramp=s.ramp,
            ),
            lambda s: {"mqar": _options(s, lengths=(s.seq_len,), vocab_size=s.recall_vocab_size)},
        ),
        Task(
            COPY,
            "Copying",
            lambda s: BYTE_VOCAB,
            lambda s: DataRecipe(
                sources=list(COPYING),
                seq_len=s.seq_len,
                copy_tokens=_copy_tokens(s),
                copy_vocab_size=COPY_VOCABULARY,
                mqar_ramp=s.ramp,
            ),
            lambda s: {"copying": _options(s, lengths=(s.seq_len,), vocab_size=COPY_VOCABULARY)},
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
            lambda s: VOCABULARY if s.corpus else BYTE_VOCAB,
            # join documents, because the evaluation beyond T tokens also joins them
            lambda s: DataRecipe(
                sources=[CORPUS if s.corpus else "stdlib"],
                tokenizer=CORPUS if s.corpus else "bytes",
                seq_len=s.seq_len,
                documents="joined",
            ),
            lambda s: {
                "perplexity-by-position": _options(s, lengths=(s.eval_length_factor * s.seq_len,), text=_text(s)),
                **(_retrieval(s) if s.corpus else {"copy": _options(s, lengths=(s.seq_len,))}),
            },
        ),
    )
}
# the suites that replace a suite of core if a model has modes: they evaluate each mode alone and switches between modes
MODE_SUITES: dict[str, tuple[str, ...]] = {
    "mqar": ("cross-mode-mqar",),
    "copying": ("isolated-copying",),
    "niah": ("cross-mode-niah",),
    "perplexity-by-position": ("isolated-perplexity-by-position", "switch-perplexity"),
    "copy": ("isolated-copy",),
    "names": ("cross-mode-names",),
}
# LTE is also evaluated at these multiples of the cap (retained keys per head) of its training
CAP_FACTORS = (0.25, 0.5, 2.0, 4.0)
_CAPPED = ("niah", "names")


def _by_cap(suite: Suite) -> Suite:
    """Return a suite that runs `suite` with LTE's cap of retained keys as in training, then with other caps.

    Each of the other caps is a mode in the rows.
    """

    def run(model: Any, tokenizer: Any, options: EvalOptions) -> SuiteResult:
        result = suite.run(model, tokenizer, options)
        layers = [mixer for mixer in model.model.mixers if isinstance(mixer, Lte)]
        trained = [layer.cap for layer in layers]
        try:
            for factor in CAP_FACTORS:
                for layer, cap in zip(layers, trained, strict=True):
                    layer.set_limits(cap=max(layer.sinks, round(factor * cap)))
                more = suite.run(model, tokenizer, options)
                result["rows"] += [{**row, "modes": f"cap {layers[0].cap}"} for row in more["rows"]]
                if "samples" in result:
                    result["samples"] += more.get("samples", [])
        finally:
            for layer, cap in zip(layers, trained, strict=True):
                layer.set_limits(cap=cap)
        return result

    return suite._replace(run=run)


ARENA_SUITES: dict[str, Suite] = {
    **SUITES,
    **BY_MODE,
    "isolated-copying": isolated("copying", copying_suite),
    "isolated-copy": isolated("copy", copy_suite),
    "names": Suite("names defined once in held-out code, in cloze form", names_suite, reads=("lengths", "text")),
    "cross-mode-names": Suite(
        "likewise, code in one mode and the name in another", cross_mode_names_suite, reads=("lengths", "text")
    ),
}
ARENA_SUITES |= {f"capped-{name}": _by_cap(ARENA_SUITES[name]) for name in _CAPPED}


def recipe(name: str, division: str, task: str, size: Size, rate: float, seed: int) -> Recipe:
    """Return the recipe of a run.

    Recipes with the same task, size, rate and seed differ only in the model, and in the callbacks that the model's
    package adds. The seed determines weights and rows, so that all contestants read the same rows in the same order.
    """
    definition = TASKS[task]
    data = replace(definition.data(size), data_seed=seed)
    base = Recipe(
        name=f"arena-{size.name}-{division}-{name}-{task}",
        description=f"{definition.title} in the arena",
        model={
            "vocab_size": definition.vocabulary(size),
            "max_position_embeddings": max(size.eval_length_factor * size.seq_len, 2 * size.needle_len),
            "initializer_range": size.initializer_range,
        },
        data=data,
        optimizer=OptimizerRecipe.in_steps(
            size.steps, size.steps // 20, size.batch_tokens, learning_rate=rate, min_learning_rate=rate / 20
        ),
        run=RunRecipe(
            seed=seed,
            dataloader_num_workers=size.dataloader_workers,
            logging_steps=max(1, size.steps // 100),
            # write one checkpoint at the end; a run that reaches the time limit writes another one
            save_steps=size.steps,
            save_total_limit=1,
        ),
    )
    return with_model(base, CONTESTANTS[name], division, size)


def located(recipe: Recipe) -> Recipe:
    """Return a recipe in which the name of the corpus is replaced by the corpus's folders on this machine."""
    sources = [str(corpus.tokens()) if source == CORPUS else source for source in recipe.data.sources]
    tokenizer = str(corpus.tokenizer()) if recipe.data.tokenizer == CORPUS else recipe.data.tokenizer
    return replace(recipe, data=replace(recipe.data, sources=sources, tokenizer=tokenizer))


def located_text(options: EvalOptions) -> EvalOptions:
    """Return options in which the name of the corpus is replaced by the corpus's folder on this machine."""
    return replace(options, text=str(corpus.tokens())) if options.text == CORPUS else options


def suites(contestant: Contestant, task: str, size: Size) -> dict[str, EvalOptions]:
    """Return the options of the suites that evaluate a contestant on a task, by name of the suite."""
    chosen = {}
    for name, options in TASKS[task].suites(size).items():
        replaced = MODE_SUITES[name] if contestant.modes else (name,)
        if contestant.capped and name in _CAPPED and size.corpus:
            replaced = (f"capped-{name}",)
        for suite in replaced:
            # measure switches of modes within a training row's length, which holds several chunks of one mode
            lengths = (size.seq_len,) if suite == "switch-perplexity" else options.lengths
            chosen[suite] = replace(options, lengths=lengths)
    return chosen
