"""The constants that `RULES.md` states; a test compares them with its text."""

from __future__ import annotations

from functools import cache
from hashlib import blake2b
from pathlib import Path

PAGE = Path(__file__).with_name("RULES.md")
# the last commit of RULES.md: first commit a change of that page, then update this line
COMMIT = "0277310f"
# minimum differences that count: in accuracy, and in loss (nats per token)
ACCURACY_EFFECT, LOSS_EFFECT = 0.02, 0.01
# maximum probability that any verdict on a paper's page is wrong, which Holm's procedure guarantees
LEVEL = 0.05
# number of replicates in the bootstrap, and seed of the generator that draws them
REPLICATES, GENERATOR_SEED = 10_000, 0
# seeds of the runs that select the learning rate; seeds of reported runs, for recall and for text
TUNING_SEEDS = (100, 101)
RECALL_SEEDS, TEXT_SEEDS = (1, 2, 3, 4, 5), (1, 2, 3)
# length of a tuning run on text as a fraction of the tokens of a reported run
TEXT_TUNING = 0.1
# ratio between neighbouring rates that extend a grid; lowest and highest rate of an extended grid
RATE_FACTOR, LOWEST_RATE, HIGHEST_RATE = 2.0, 1e-5, 1e-1
# a run has learned if its accuracy in the easiest case covers at least this fraction of the way from guessing to 1;
# NAMES_LEARNED is for names in cloze form
LEARNED, NAMES_LEARNED = 0.5, 0.1
# a run on text has learned if its final training loss is at most this fraction of ln(vocabulary)
TEXT_LEARNED = 0.5
# a claim counts only if at least this fraction of the baseline's runs have learned
LEARNED_RUNS = 0.8
# maximum relative differences between models of a comparison: in parameters, and in state size
PARAMETER_TOLERANCE, STATE_TOLERANCE = 0.01, 0.05


@cache
def digest() -> str:
    """Return a hash of RULES.md, which is stored in each result."""
    return blake2b(PAGE.read_bytes(), digest_size=8).hexdigest()
