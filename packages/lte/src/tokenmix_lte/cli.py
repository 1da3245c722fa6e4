"""The command `tokenmix-lte`: core's command line with this package's recipes, suites and a command of its own."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from tokenmix_core import cli


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    return cli.main(
        argv,
        prog="tokenmix-lte",
        recipes="tokenmix_lte.recipes:RECIPES",
        suites="tokenmix_lte.evals:SUITES",
        commands=_add_commands,
    )


def _add_commands(add: cli.AddCommand) -> None:
    sub = add(
        "evict",
        "let the full attention of a trained model hold so many tokens, without training",
        "runs/gdn-attention --method tova --held 1024 --out evicting",
        "tokenmix_lte.training_free:command",
    )
    sub.add_argument("checkpoint", metavar="CHECKPOINT", help="folder of a trained model")
    sub.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to make")
    sub.add_argument(
        "--method",
        choices=("tova", "uniform"),
        required=True,
        help="tova drops the token with the least attention; uniform holds a window and every n-th token before it",
    )
    sub.add_argument("--held", type=int, default=1024, metavar="N", help="tokens that a layer holds (default: 1024)")


if __name__ == "__main__":
    sys.exit(main())
