"""The command `tokenmix-lte`: core's command line with this package's recipes and suites, and its own commands."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

from tokenmix_core import cli as core_cli


def _add_limits(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("retention", "limits of the LTE layers for this command")
    group.add_argument("--cap", metavar="N", help="keys beyond the window that a head retains; `none` for no limit")
    group.add_argument("--window", type=int, metavar="W", help="newest tokens that a layer always sees")


def _add_commands(add: core_cli.AddCommand) -> None:
    sub = add(
        "convert",
        "replace attention in a pretrained transformer by learned token eviction, for further training",
        "models/Llama-3.2-1B --layers 1,3,5,7,9,11,13,15 --out converted",
        "tokenmix_lte.conversion:command",
    )
    sub.add_argument("model", metavar="MODEL", help="folder of a Llama, Mistral, Qwen2 or Qwen3 checkpoint")
    sub.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to write")
    sub.add_argument(
        "--layers", type=core_cli.layer_indices, metavar="I,I", help="layers to convert, counted from 0 (default: all)"
    )
    sub.add_argument("--window", type=int, default=768, metavar="W", help="newest tokens that a layer always sees")
    help_text = "keys beyond the window that a head retains in evaluation"
    sub.add_argument("--cap", type=int, default=512, metavar="N", help=help_text)
    help_text = "first tokens that stay visible, counted in the cap"
    sub.add_argument("--sinks", type=int, default=4, metavar="N", help=help_text)
    help_text = "what decides which keys are retained"
    sub.add_argument("--scorer", choices=("cnn", "causal", "mlp", "none", "uniform"), default="cnn", help=help_text)
    sub.add_argument("--dtype", default="auto", help="float32, bfloat16 or float16 (default: the checkpoint's dtype)")

    sub = core_cli.add_finetune(
        add,
        "train a converted model and its scorers further, or the scorers alone",
        "converted --scorer --out runs/scorer --sources data/fineweb-edu",
        "tokenmix_lte.finetune:command",
    )
    help_text = "train the scorers alone, everything else frozen (default: all together)"
    sub.add_argument("--scorer", action="store_true", default=None, help=help_text)

    sub = add(
        "evict",
        "bound the tokens that the full attention layers of a trained model hold, without training",
        "runs/gdn-attention --method tova --held 1024 --out evicting",
        "tokenmix_lte.training_free:command",
    )
    sub.add_argument("checkpoint", metavar="CHECKPOINT", help="folder of a trained model")
    sub.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to write")
    sub.add_argument(
        "--method",
        choices=("tova", "uniform"),
        required=True,
        help="tova evicts the token with the least attention; uniform holds a window and every n-th token before it",
    )
    sub.add_argument("--held", type=int, default=1024, metavar="N", help="tokens that a layer holds (default: 1024)")

    sub = add(
        "tables",
        "join the rows of Tables 1 to 3 that `eval` has measured of several models",
        "runs/lalte runs/gdn-attention --out tables",
        "tokenmix_lte.tables:command",
    )
    sub.add_argument("checkpoints", nargs="+", metavar="CHECKPOINT", help="folder of a model with its evaluation")
    sub.add_argument("--out", type=Path, metavar="DIR", help="folder for tables and JSON; without it none is written")


main = partial(
    core_cli.main,
    prog="tokenmix-lte",
    recipes="tokenmix_lte.recipes:RECIPES",
    suites="tokenmix_lte.evals:SUITES",
    commands=_add_commands,
    arguments=_add_limits,
    using="tokenmix_lte.limits:using_retention",
)


if __name__ == "__main__":
    sys.exit(main())
