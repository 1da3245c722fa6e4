"""The command `tokenmix-nats-l`: core's command line with this package's recipes and suites, and `--types`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from tokenmix_core import cli as core_cli


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    return core_cli.main(
        argv,
        prog="tokenmix-nats-l",
        recipes="tokenmix_nats_l.recipes:RECIPES",
        suites="tokenmix_nats_l.evals:SUITES",
        arguments=_add_types,
        using="tokenmix_nats_l.evals:using_types",
    )


def _add_types(command: str, parser: argparse.ArgumentParser) -> None:
    if command in ("eval", "generate", "bench"):
        help_text = "chunk types of all NAtS-L layers: learned, softmax, linear, alternate, or a pattern such as lls"
        parser.add_argument("--types", metavar="TYPES", help=help_text)


if __name__ == "__main__":
    sys.exit(main())
