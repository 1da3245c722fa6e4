"""The papers' claims, read from `RULES.md`, and the verdicts on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from arena import rules
from arena.contestants import PARAMETERS, STATE
from arena.intervals import Estimate, holm
from arena.scores import EXCESS, Scores, Variant

HOLDS, NOT_HOLDS, UNDECIDED, NOT_COUNTED, NOT_RUN = "holds", "does not hold", "undecided", "not counted", "not run"
_BETTER, _NO_WORSE = "better", "no worse"


class Claim(NamedTuple):
    """A claim of a paper: one row in the table of questions in RULES.md.

    Attributes:
        name: short name of the paper, and number of the claim.
        text: the claim in words.
        task, division, metric: names that select the value by which two variants are compared.
        subject, baseline: the two variants that are compared.
        bound: the claim holds if the difference (subject − baseline) is above this bound or, if lower values are
            better, below it. The bound has the sign of an improvement for "better", the opposite sign for "no worse".
        shown: how the paper supports the claim.
    """

    name: str
    text: str
    task: str
    division: str
    metric: str
    subject: Variant
    baseline: Variant
    bound: float
    shown: str

    @property
    def paper(self) -> str:
        """The short name of the paper."""
        return self.name.rpartition("-")[0]

    @property
    def higher(self) -> bool:
        """True if a higher value is better."""
        return not self.metric.startswith(("loss", EXCESS))


class Verdict(NamedTuple):
    """The verdict on one claim.

    Attributes:
        outcome: one of the constants in this module.
        difference: estimated difference (subject − baseline); None if it was not measured.
        level: level at which Holm's procedure tested the claim; 0 after the first claim that stays undecided.
        learned: number of the baseline's runs that have learned, and number of its runs.
    """

    outcome: str
    difference: Estimate | None = None
    level: float = 0.0
    learned: tuple[int, int] = (0, 0)


def _read() -> dict[str, Claim]:
    lines = rules.PAGE.read_text(encoding="utf-8").partition("## Questions")[2].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    return {row[0]: _claim(*row) for row in rows[2:]}


def _claim(name: str, text: str, task: str, metric: str, subject: str, baseline: str, kind: str, shown: str) -> Claim:
    task, _, division = task.partition(", ")
    ours, theirs = ((side.partition(" ")[0], side.partition(" ")[2]) for side in (subject, baseline))
    claim = Claim(name, text, task, STATE if division else PARAMETERS, metric, ours, theirs, 0.0, shown)
    effect = {_BETTER: 1, _NO_WORSE: -1}[kind] * (rules.ACCURACY_EFFECT if claim.higher else rules.LOSS_EFFECT)
    return claim._replace(bound=effect if claim.higher else -effect)


CLAIMS = _read()


def judge(claims: Sequence[Claim], scores_of: Callable[[Claim], Scores | None]) -> list[Verdict]:
    """Return the verdicts on all claims of one paper.

    Args:
        claims: all claims of the paper.
        scores_of: returns the scores for the task and division of a claim; None if `Size.supports_claims` is False.
    """
    found: list[Verdict] = []
    for claim in claims:
        scores = scores_of(claim)
        difference = scores and scores.difference(claim.subject, claim.baseline, claim.metric)
        if scores is None or difference is None:
            found.append(Verdict(NOT_RUN))
            continue
        learned, runs = scores.learned(claim.baseline, claim.metric)
        counted = learned >= rules.LEARNED_RUNS * runs - 1e-9
        found.append(Verdict(UNDECIDED if counted else NOT_COUNTED, difference, learned=(learned, runs)))
    tested = [i for i, verdict in enumerate(found) if verdict.difference is not None]
    p_values = [
        verdict.difference.p_value(claims[i].bound) if verdict.outcome == UNDECIDED and verdict.difference else 1.0
        for i in tested
        for verdict in (found[i],)
    ]
    for i, p_value, level in zip(tested, p_values, holm(p_values), strict=True):
        verdict = found[i]._replace(level=level)
        if p_value <= level and verdict.difference is not None:
            better = (verdict.difference.mean > claims[i].bound) == claims[i].higher
            verdict = verdict._replace(outcome=HOLDS if better else NOT_HOLDS)
        found[i] = verdict
    return found
