"""The arena's rules: the constants that RULES.md quotes are those of the code."""

from pathlib import Path

from arena import rules
from arena.models import TOLERANCE

TEXT = " ".join((Path(rules.__file__).parent / "RULES.md").read_text(encoding="utf-8").split())


def test_the_page_quotes_the_constants_of_the_code():
    quoted = (
        f"{rules.ACCURACY_EFFECT} of accuracy and {rules.LOSS_EFFECT} nats matter",
        f"Parameters within {100 * rules.PARAMETER_TOLERANCE:g} %",
        f"state within {100 * rules.STATE_TOLERANCE:g} %",
        f"One grid, factor {rules.RATE_FACTOR:g}",
        f"tuning seeds {rules.TUNING_SEEDS[0]} and {rules.TUNING_SEEDS[1]}",
        f"with {rules.TEXT_TUNING} of the tokens",
        f"from {rules.LOWEST_RATE} to {rules.HIGHEST_RATE}",
        f"{rules.RECALL_SEEDS[0]} to {rules.RECALL_SEEDS[-1]} for recall and copying",
        f"{rules.TEXT_SEEDS[0]} to {rules.TEXT_SEEDS[-1]} for text",
        f"{rules.REPLICATES:,} replicates, generator seed {rules.GENERATOR_SEED}",
        f"level of {rules.LEVEL}",
        f"at least {rules.LEARNED} of the way from a guess",
        f"names {rules.NAMES_LEARNED} of the way",
        f"at most {rules.TEXT_LEARNED} · ln(vocabulary)",
        f"at least {rules.LEARNED_RUNS} of the baseline's final runs learned",
    )
    for sentence in quoted:
        assert sentence in TEXT, sentence
    assert TOLERANCE == {"parameters": rules.PARAMETER_TOLERANCE, "state": rules.STATE_TOLERANCE}


def test_final_seeds_are_enough_and_none_of_them_tunes():
    assert len(rules.TUNING_SEEDS) >= 2
    assert len(set(rules.RECALL_SEEDS)) >= 5
    assert len(set(rules.TEXT_SEEDS)) >= 3
    assert not {*rules.RECALL_SEEDS, *rules.TEXT_SEEDS} & set(rules.TUNING_SEEDS)
