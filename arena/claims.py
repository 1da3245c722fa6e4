"""Claims of the papers, stated as comparisons of two variants, and their verdicts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from arena.contestants import EVICTION_METHODS, PARAMETERS, STATE
from arena.scores import MEAN, Estimate, Scores, Variant, chances, label
from arena.sizes import MIN_SEEDS, Size
from arena.tasks import MQAR, NEEDLE, TEXT
from tokenmix_nats_l.recipes import TABLE_4

HELD, NOT_HELD, UNDECIDED, NOT_LEARNT, NOT_MEASURED = (
    "held",
    "did not hold",
    "not decided",
    "not learnt",
    "not measured",
)
# mean accuracy above the chance that the baseline must reach
LEARNT_MARGIN = 0.05
# tolerance for rounding in the interval
_ROUNDING = 1e-9
# questions of all sizes together, for which Holm's procedure bounds the probability of any wrong verdict
QUESTIONS, LEVEL = 53, 0.05


class Claim(NamedTuple):
    """A paper's claim as one comparison.

    Attributes:
        paper: the paper.
        text: the claim in one sentence.
        division, task, metric: the compared number.
        variant: subject of the claim.
        baseline: variant that it is compared with.
        margin: difference that still counts as equal; 0 if the claim is an improvement.
        higher: True if a higher value is better.
    """

    paper: str
    text: str
    division: str
    task: str
    metric: str
    variant: Variant
    baseline: Variant
    margin: float = 0.0
    higher: bool = True


def _recall(paper: str, text: str, variant: Variant, baseline: Variant, margin: float = 0.0) -> list[Claim]:
    """Return a claim about recall twice: for pairs and for needles."""
    return [
        Claim(paper, f"{text} ({examples})", PARAMETERS, task, MEAN, variant, baseline, margin)
        for task, examples in ((MQAR, "pairs"), (NEEDLE, "needles"))
    ]


def _text(paper: str, text: str, variant: Variant, baseline: Variant, margin: float = 0.0, times: int = 1) -> Claim:
    return Claim(paper, text, PARAMETERS, TEXT, f"loss at {times}x", variant, baseline, margin, higher=False)


_EQUAL_ACCURACY, _EQUAL_LOSS = 0.02, 0.01
_ATTENTION, _GDN, _GDN_H = ("attention", ""), ("gdn", ""), ("gdn-h", "")
_ORYX = "Oryx"
CLAIMS: list[Claim] = [
    *_recall("Gated DeltaNet", "GDN with attention in one layer of four recalls more than GDN", _GDN_H, _GDN),
    _text("Gated DeltaNet", "Gated DeltaNet predicts text better than Mamba-2", _GDN, ("mamba2", "")),
    Claim("Gated DeltaNet", "At equal state size Gated DeltaNet recalls more than Mamba-2", STATE, MQAR, MEAN, _GDN,
          ("mamba2", "")),
    *_recall("NHA", "NHA-H recalls more than GDN-H", ("nha-h", ""), _GDN_H),
    *_recall("NHA", "NHA-H recalls more than GSA-H", ("nha-h", ""), ("gsa-h", "")),
    *_recall("NHA", "NHA-H recalls more than attention", ("nha-h", ""), _ATTENTION),
    Claim("NHA", "At equal state size NHA recalls more than GSA", STATE, MQAR, MEAN, ("nha", ""), ("gsa", "")),
    Claim("NHA", "At equal state size NHA recalls more than GDN", STATE, MQAR, MEAN, ("nha", ""), _GDN),
    *(
        claim
        for name, title, base in (("oryx-tm", "Oryx-TM", ("mamba2", "")), ("oryx-tg", "Oryx-TG", _GDN))
        for claim in (
            _text(_ORYX, f"In attention mode {title} predicts text no worse than attention",
                  (name, "attention"), _ATTENTION, _EQUAL_LOSS),
            _text(_ORYX, f"In linear mode {title} predicts text no worse than {label(base)}",
                  (name, "linear"), base, _EQUAL_LOSS),
            *_recall(_ORYX, f"After a context in linear mode, {title} in attention mode recalls as well as attention",
                     (name, "linear → attention"), _ATTENTION, _EQUAL_ACCURACY),
        )
    ),
    *_recall("LTE", "laLTE recalls more than Gated DeltaNet", ("lalte", ""), _GDN),
    Claim("LTE", "At equal state size laLTE recalls more than GDN", STATE, MQAR, MEAN, ("lalte", ""), _GDN),
    *(
        Claim("LTE", f"laLTE recalls more than {label(baseline)}", PARAMETERS, MQAR, MEAN, ("lalte", ""), baseline)
        for baseline in (("gdn-swa", ""), ("lalte-mlp", ""), *(("gdn-attention", x) for x in EVICTION_METHODS))
    ),
    *_recall("LTE", "laNSA recalls more than Gated DeltaNet", ("lansa", ""), _GDN),
    *_recall("NAtS-L", "NAtS-L recalls more than Gated DeltaNet", ("nats-l", ""), _GDN),
    *_recall("NAtS-L", "NAtS-L Hybrid recalls no less than GDN-H", ("nats-l-h", ""), _GDN_H, _EQUAL_ACCURACY),
    _text("NAtS-L", "NAtS-L Hybrid predicts text no worse than GDN-H", ("nats-l-h", ""), _GDN_H, _EQUAL_LOSS),
    *(
        _text("NAtS-L", f"At 16 times the training length {label(variant)} predicts text better than {label(baseline)}",
              variant, baseline, times=16)
        for variant, baseline in ((("nats-l", ""), _ATTENTION), (("nats-l-h", ""), _GDN_H))
    ),
    *(
        Claim("NAtS-L", f"NAtS-L Hybrid recalls no less than with {name.replace('-', ' ')}", PARAMETERS, MQAR, MEAN,
              ("nats-l-h", ""), (f"nats-l-h-{name}", ""), _EQUAL_ACCURACY)
        for name in TABLE_4
    ),
]  # fmt: skip


class Verdict(NamedTuple):
    """The verdict on a claim and the measured difference."""

    outcome: str
    difference: Estimate | None


def judge(claim: Claim, scores: Scores, size: Size) -> Verdict:
    """Compare the interval of the difference with the margin.

    The outcome is `HELD` or `NOT_HELD` if the whole interval lies on one side of the margin, else `UNDECIDED`. It is
    `NOT_MEASURED` if the size does not support claims or seeds are missing, and `NOT_LEARNT` if the baseline has not
    learnt the task. `corrected` accounts for the number of claims.
    """
    if not size.supports_claims:
        return Verdict(NOT_MEASURED, None)
    difference = scores.difference(claim.variant, claim.baseline, claim.metric)
    if difference is None or difference.half_width is None or difference.seeds < MIN_SEEDS:
        return Verdict(NOT_MEASURED, difference)
    baseline = scores.estimate(claim.baseline, claim.metric)
    learnt = chances(claim.task, size).get(claim.metric, 0.0) + LEARNT_MARGIN
    if claim.higher and baseline is not None and baseline.mean < learnt:
        return Verdict(NOT_LEARNT, difference)
    better = (1 if claim.higher else -1) * difference.mean + claim.margin
    if abs(better) <= difference.half_width + _ROUNDING:
        return Verdict(UNDECIDED, difference)
    return Verdict(HELD if better > 0 else NOT_HELD, difference)


def corrected(claims: Sequence[Claim], verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Turn verdicts that do not survive Holm's correction for `QUESTIONS` questions into `UNDECIDED`."""

    def p_value(i: int) -> float:
        difference = verdicts[i].difference
        return (
            1.0
            if difference is None
            else difference.p_value(-claims[i].margin if claims[i].higher else claims[i].margin)
        )

    kept = list(verdicts)
    decided = sorted((i for i, v in enumerate(verdicts) if v.outcome in (HELD, NOT_HELD)), key=p_value)
    surviving = True
    for rank, i in enumerate(decided):
        surviving = surviving and p_value(i) <= LEVEL / (QUESTIONS - rank)
        if not surviving:
            kept[i] = verdicts[i]._replace(outcome=UNDECIDED)
    return kept
