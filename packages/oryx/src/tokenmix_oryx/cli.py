"""The command `tokenmix-oryx`: core's command line with this package's recipes, suites and mode options."""

from __future__ import annotations

import argparse
import sys
from functools import partial

from tokenmix_core import cli as core_cli


def _add_modes(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "modes",
        "MODE is linear, attention, or a schedule: 0:linear,1000:attention by position, 0.0:linear,0.975:attention by "
        "share of the prompt.",
    )
    group.add_argument(
        "--prefill-mode", type=_mode, metavar="MODE", help="mode of prompts and scored text (default: the checkpoint's)"
    )
    group.add_argument(
        "--generation-mode",
        type=_mode,
        metavar="MODE",
        help="mode of generated tokens (default: that at the end of the prompt)",
    )
    group.add_argument(
        "--no-keep-kv", action="store_true", help="generate in linear mode, without storing keys and values"
    )


def _mode(text: str) -> str | list[tuple[int | float, str]]:
    """Parse a mode or the (start, mode) pairs of a schedule from text; the model checks their values later."""
    if ":" not in text:
        return text
    pairs = [part.partition(":") for part in text.split(",")]
    try:
        return [(float(start) if "." in start else int(start), mode.strip()) for start, _, mode in pairs]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"expected linear, attention or a schedule such as 0:linear,1000:attention, got {text!r}"
        ) from None


main = partial(
    core_cli.main,
    prog="tokenmix-oryx",
    recipes="tokenmix_oryx.recipes:RECIPES",
    suites="tokenmix_oryx.evals:SUITES",
    arguments=_add_modes,
    using="tokenmix_oryx.commands:chosen_modes",
)


if __name__ == "__main__":
    sys.exit(main())
