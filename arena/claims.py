"""The papers' claims, as comparisons that the arena's numbers can answer, and the words for each answer."""

from __future__ import annotations

from typing import NamedTuple

from arena.contestants import EVICTIONS, PARAMETERS, STATE
from arena.measures import MEAN, Estimate, Line, Scores, title
from arena.sizes import LEAST_SEEDS, Size
from arena.tasks import MQAR, NEEDLE, TEXT
from tokenmix_nats_l.recipes import TABLE_4

HELD, NOT_HELD, OPEN, NOT_LEARNT, NOT_MEASURED = "held", "did not hold", "not decided", "not learnt", "not measured"
# mean accuracy that one side must reach: two that recall nothing are equal, which says nothing about them
LEARNT = 0.05
# what is less is the rounding of a sum
_ROUNDING = 1e-9


class Claim(NamedTuple):
    """A paper's claim as one comparison.

    Attributes:
        paper: whose claim it is.
        says: the claim, as a sentence of ours.
        division, task, column: which number it is about.
        line: of what it is claimed.
        other: what it is compared with.
        margin: how much worse still counts as equal; 0 where better is claimed.
        higher: whether more is better.
    """

    paper: str
    says: str
    division: str
    task: str
    column: str
    line: Line
    other: Line
    margin: float = 0.0
    higher: bool = True


def _recall(paper: str, says: str, line: Line, other: Line, margin: float = 0.0) -> list[Claim]:
    """A claim on recall is asked of pairs and of needles."""
    return [
        Claim(paper, f"{says} ({what})", PARAMETERS, task, MEAN, line, other, margin)
        for task, what in ((MQAR, "pairs"), (NEEDLE, "needles"))
    ]


def _text(paper: str, says: str, line: Line, other: Line, margin: float = 0.0, times: int = 1) -> Claim:
    return Claim(paper, says, PARAMETERS, TEXT, f"loss at {times}x", line, other, margin, higher=False)


_EQUAL_ACCURACY, _EQUAL_LOSS = 0.02, 0.01
_ATTENTION, _GDN, _GDN_H = ("attention", ""), ("gdn", ""), ("gdn-h", "")
_ORYX = "Oryx"
CLAIMS: list[Claim] = [
    *_recall("Gated DeltaNet", "GDN with attention in one layer of four recalls more than GDN", _GDN_H, _GDN),
    _text("Gated DeltaNet", "Gated DeltaNet predicts text better than Mamba-2", _GDN, ("mamba2", "")),
    Claim("Gated DeltaNet", "At one size of state Gated DeltaNet recalls more than Mamba-2", STATE, MQAR, MEAN, _GDN,
          ("mamba2", "")),
    *_recall("NHA", "NHA-H recalls more than GDN-H", ("nha-h", ""), _GDN_H),
    *_recall("NHA", "NHA-H recalls more than GSA-H", ("nha-h", ""), ("gsa-h", "")),
    *_recall("NHA", "NHA-H recalls more than attention", ("nha-h", ""), _ATTENTION),
    Claim("NHA", "At one size of state NHA recalls more than GSA", STATE, MQAR, MEAN, ("nha", ""), ("gsa", "")),
    Claim("NHA", "At one size of state NHA recalls more than GDN", STATE, MQAR, MEAN, ("nha", ""), _GDN),
    *(
        claim
        for name, base in (("oryx-tm", ("mamba2", "")), ("oryx-tg", _GDN))
        for claim in (
            _text(_ORYX, f"In attention mode {title((name, ''))} predicts text no worse than attention",
                  (name, "attention"), _ATTENTION, _EQUAL_LOSS),
            _text(_ORYX, f"In linear mode {title((name, ''))} predicts text no worse than {title(base)}",
                  (name, "linear"), base, _EQUAL_LOSS),
            *_recall(_ORYX, f"Read in linear mode, asked in attention mode, {title((name, ''))} recalls as attention",
                     (name, "linear → attention"), _ATTENTION, _EQUAL_ACCURACY),
        )
    ),
    *_recall("LTE", "laLTE recalls more than Gated DeltaNet", ("lalte", ""), _GDN),
    Claim("LTE", "At one size of state laLTE recalls more than GDN", STATE, MQAR, MEAN, ("lalte", ""), _GDN),
    *(
        Claim("LTE", f"laLTE recalls more than {title(other)}", PARAMETERS, MQAR, MEAN, ("lalte", ""), other)
        for other in (("gdn-swa", ""), ("lalte-mlp", ""), *(("gdn-attention", method) for method in EVICTIONS))
    ),
    *_recall("LTE", "laNSA recalls more than Gated DeltaNet", ("lansa", ""), _GDN),
    *_recall("NAtS-L", "NAtS-L recalls more than Gated DeltaNet", ("nats-l", ""), _GDN),
    *_recall("NAtS-L", "NAtS-L Hybrid recalls no less than GDN-H", ("nats-l-h", ""), _GDN_H, _EQUAL_ACCURACY),
    _text("NAtS-L", "NAtS-L Hybrid predicts text no worse than GDN-H", ("nats-l-h", ""), _GDN_H, _EQUAL_LOSS),
    *(
        _text("NAtS-L", f"At 16 times the training length {title(line)} predicts text better than {title(other)}",
              line, other, times=16)
        for line, other in ((("nats-l", ""), _ATTENTION), (("nats-l-h", ""), _GDN_H))
    ),
    *(
        Claim("NAtS-L", f"NAtS-L Hybrid recalls no less than with {name.replace('-', ' ')}", PARAMETERS, MQAR, MEAN,
              ("nats-l-h", ""), (f"nats-l-h-{name}", ""), _EQUAL_ACCURACY)
        for name in TABLE_4
    ),
]  # fmt: skip


class Verdict(NamedTuple):
    """The answer of the numbers to a claim, and the difference that gives it."""

    word: str
    difference: Estimate | None


def judge(claim: Claim, scores: Scores, size: Size) -> Verdict:
    """Held where the whole interval of the difference lies on the claim's side, not held where all of it lies beyond.

    Nothing is measured by a size without rates to choose from and seeds for an interval, nor before as many seeds of
    both are there. Where neither side has learnt the task, the numbers answer nothing.
    """
    if not size.says_something:
        return Verdict(NOT_MEASURED, None)
    difference = scores.difference(claim.line, claim.other, claim.column)
    if difference is None or difference.half is None or difference.seeds < LEAST_SEEDS:
        return Verdict(NOT_MEASURED, difference)
    sides = [scores.estimate(line, claim.column) for line in (claim.line, claim.other)]
    if claim.higher and all(side is not None and side.mean < LEARNT for side in sides):
        return Verdict(NOT_LEARNT, difference)
    better = (1 if claim.higher else -1) * difference.mean + claim.margin
    if abs(better) <= difference.half + _ROUNDING:
        return Verdict(OPEN, difference)
    return Verdict(HELD if better > 0 else NOT_HELD, difference)
