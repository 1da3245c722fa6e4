"""The command `tokenmix-nats-l`: core's command line with this package's recipes and suites."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tokenmix_core import cli as core_cli


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    return core_cli.main(
        argv, prog="tokenmix-nats-l", recipes="tokenmix_nats_l.recipes:RECIPES", suites="tokenmix_nats_l.evals:SUITES"
    )


if __name__ == "__main__":
    sys.exit(main())
