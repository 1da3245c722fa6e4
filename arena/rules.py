"""The constants of `RULES.md`; a test compares them with its text."""

from __future__ import annotations

from functools import cache
from hashlib import blake2b
from pathlib import Path

PAGE = Path(__file__).with_name("RULES.md")
# commit of the page; a change of the page is committed first, then this line
COMMIT = "0277310f"
# difference that matters: accuracy, and nats per token of loss
ACCURACY_EFFECT, LOSS_EFFECT = 0.02, 0.01
# probability of any wrong verdict on a page, bounded by Holm's procedure
LEVEL = 0.05
# bootstrap replicates, and the seed of their generator
REPLICATES, GENERATOR_SEED = 10_000, 0
# seeds of the runs that select the learning rate, and of the results
TUNING_SEEDS = (100, 101)
RECALL_SEEDS, TEXT_SEEDS = (1, 2, 3, 4, 5), (1, 2, 3)
# fraction of a run's tokens that a tuning run on text reads
TEXT_TUNING = 0.1
# factor between neighbouring rates of an extended grid, and the rates beyond which it is not extended
RATE_FACTOR, LOWEST_RATE, HIGHEST_RATE = 2.0, 1e-5, 1e-1
# a run has learned if its accuracy in the easiest case is at least this fraction of the way from a guess to 1;
# NAMES_LEARNED is for names in cloze form
LEARNED, NAMES_LEARNED = 0.5, 0.1
# fraction of ln(vocabulary) that the final training loss on text may not exceed
TEXT_LEARNED = 0.5
# fraction of the baseline's runs that must have learned
LEARNED_RUNS = 0.8
# largest relative differences between the models of a comparison
PARAMETER_TOLERANCE, STATE_TOLERANCE = 0.01, 0.05


@cache
def digest() -> str:
    """Return the hash of the page, which each result holds."""
    return blake2b(PAGE.read_bytes(), digest_size=8).hexdigest()
