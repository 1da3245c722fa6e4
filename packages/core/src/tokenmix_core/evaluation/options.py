"""The options and the results of suites."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, NotRequired, TypedDict

from tokenmix_core._utils.validation import check_fields

# options that only some suites read
OPTIONAL = ("lengths", "max_length", "include", "text", "prompt", "vocab_size")


@dataclass(frozen=True)
class EvalOptions:
    """Options of suites; None stands for the suite's own default.

    Attributes:
        limit: number of examples for each task.
        batch_size: number of sequences in one forward pass.
        lengths: context lengths, in tokens, at which to measure.
        max_length: maximum length of a prompt in tokens, answer included; longer prompts are cut. In the suite
            "samples", the number of new tokens.
        tasks: names of those tasks of the suite that are run; for the suite "lm-eval", any task that lm-eval has.
        include: folders with further tasks for lm-eval.
        text: a text to measure on or to insert needles in: a token file, of which the held-out part is read; a text,
            JSONL or parquet file, a folder of these, or a dataset; by default the held-out part of the built-in corpus.
        prompt: beginning of generated samples; by default the beginnings of held-out documents.
        vocab_size: number of different tokens in synthetic sequences, counted from token 0.
        seed: seed of random data.
        progress: whether to show progress bars.
        split_rows: whether to split each row over all processes, which must make the same call (only in
            "perplexity-by-position").

    Raises:
        ValueError: an invalid value; the message names its field.
    """

    limit: int | None = None
    batch_size: int | None = None
    lengths: tuple[int, ...] | None = None
    max_length: int | None = None
    tasks: tuple[str, ...] | None = None
    include: tuple[str, ...] | None = None
    text: str | None = None
    prompt: str | None = None
    vocab_size: int | None = None
    seed: int = 0
    progress: bool = True
    split_rows: bool = False

    def __post_init__(self) -> None:
        check_fields(self, EvalOptions)
        for name in ("limit", "batch_size", "max_length", "vocab_size"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value!r}")
        if self.seed < 0:
            raise ValueError(f"seed must be at least 0, got {self.seed!r}")
        if self.lengths is not None:
            if not self.lengths or min(self.lengths) < 2:
                raise ValueError(f"lengths must be integers from 2 on, got {self.lengths!r}")
            if len(set(self.lengths)) < len(self.lengths):
                raise ValueError(f"lengths must differ from each other, got {self.lengths!r}")
        if self.tasks is not None and not self.tasks:
            raise ValueError("tasks must name at least one task, got none")

    def choose(self, suite: str, tasks: tuple[str, ...]) -> tuple[str, ...]:
        """Return those of the suite's `tasks` that the options name (by default all), in the suite's order.

        Raises:
            ValueError: the options name a task that the suite does not have.
        """
        if self.tasks is None:
            return tasks
        if unknown := [task for task in self.tasks if task not in tasks]:
            raise ValueError(f"suite {suite} has no task {unknown[0]!r}; it has {', '.join(tasks)}")
        return tuple(task for task in tasks if task in self.tasks)

    def one_length(self, suite: str, default: int) -> int:
        """Return the only length that a suite measures: the largest of `lengths`, else `max_length` or `default`.

        If there are several lengths, print on stderr which one is used.
        """
        lengths = self.lengths or (self.max_length or default,)
        if len(lengths) > 1:
            listed = ", ".join(map(str, lengths))
            print(f"{suite} measures at one length: {max(lengths)} tokens, the largest of {listed}", file=sys.stderr)
        return max(lengths)


# curves by name: x values and y values of the points, two lists of equal length
Series = dict[str, tuple[list[float], list[float]]]


class Plot(TypedDict):
    """Curves over one axis.

    Attributes:
        title, x, y: names of the plot and its axes, with units.
        log_x, log_y: whether an axis is logarithmic; by default it is not.
        shares: whether y is a fraction, shown from 0 to 1; by default it is not.
        series: the curves.
        points: names of the series that are drawn as points without a line, such as several values at one x.
        heatmap: rows of values from 0 to 1, drawn instead of curves; all have the same length, the first is at the
            bottom.
        x_labels, y_labels: names of the heatmap's columns and rows; by default their indices.
    """

    title: str
    x: str
    y: str
    log_x: NotRequired[bool]
    log_y: NotRequired[bool]
    shares: NotRequired[bool]
    series: Series
    points: NotRequired[list[str]]
    heatmap: NotRequired[list[list[float]]]
    x_labels: NotRequired[list[str]]
    y_labels: NotRequired[list[str]]


def layer_heatmap(title: str, x: str, layers: Iterable[int], values: list[list[float]]) -> Plot:
    """Return a heatmap with one row of values for each layer; the first layer is at the bottom."""
    labels = [str(layer) for layer in layers]
    return {"title": title, "x": x, "y": "layer", "series": {}, "heatmap": values, "y_labels": labels}


class SuiteResult(TypedDict):
    """The results of a suite: plain data, fit for JSON without `failed`.

    Attributes:
        suite: the suite's name.
        settings: the settings on which the results depend.
        rows: the rows of the table, each a flat dictionary.
        plots: the plots.
        samples: for each row, the values of its examples in order: accuracies, or losses in nats.
        failed: errors of failed parts (lengths or tasks) by name; `rows` come from the other parts.
        provenance: the model, options, text and software that made the result.
    """

    suite: str
    settings: dict[str, Any]
    rows: list[dict[str, Any]]
    plots: list[Plot]
    samples: NotRequired[list[list[float]]]
    failed: NotRequired[dict[str, Exception]]
    provenance: NotRequired[dict[str, Any]]


class Suite(NamedTuple):
    """A named evaluation.

    Attributes:
        summary: one line on what the suite measures, for `info` and `--help`.
        run: `(model, tokenizer, options) -> SuiteResult`.
        needs: a function of the options that returns the minimum number of held-out text tokens; None if the suite
            needs no text.
        reads: the options in `OPTIONAL` that the suite reads; None if unknown.
    """

    summary: str
    run: Callable[[Any, Any, EvalOptions], SuiteResult]
    needs: Callable[[EvalOptions], int] | None = None
    reads: tuple[str, ...] | None = None

    @property
    def reads_text(self) -> bool:
        """False if the suite is known to read no text."""
        return self.reads is None or "text" in self.reads


def one_sequence(default: int) -> Callable[[EvalOptions], int]:
    """Return the function `needs` of a suite that measures one sequence of the largest of the options' lengths.

    Without lengths, the sequence has `max_length` or else `default` tokens.
    """
    return lambda options: max(options.lengths or (options.max_length or default,))
