"""The command `tokenmix-nats-l`: core's command line with this package's recipes, suites, `convert` and `--types`."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

from tokenmix_core import cli as core_cli


def _add_commands(add: core_cli.AddCommand) -> None:
    sub = add(
        "convert",
        "replace trained Gated DeltaNet or attention layers by NAtS-L, or read a checkpoint of the authors' code",
        "runs/gdn --layers 3,7,11 --out converted",
        "tokenmix_nats_l.conversion:command",
    )
    sub.add_argument("model", metavar="MODEL", help="folder of a model: ours, FLA's, transformers' or the authors'")
    sub.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to write")
    help_text = "layers to convert, counted from 0 (default: all of Gated DeltaNet and attention)"
    sub.add_argument("--layers", type=core_cli.layer_indices, metavar="I,I", help=help_text)
    help_text = "softmax heads that share the types of one delta-rule head"
    sub.add_argument("--group", type=int, default=1, metavar="G", help=help_text)
    sub.add_argument("--chunk", type=int, default=64, metavar="C", help="chunk size, a multiple of 64")
    sub.add_argument("--dtype", default="auto", help="float32, bfloat16 or float16 (default: the checkpoint's dtype)")


def _add_types(parser: argparse.ArgumentParser) -> None:
    help_text = "chunk types of all NAtS-L layers: learned, softmax, linear, alternate, or a pattern such as lls"
    parser.add_argument("--types", metavar="TYPES", help=help_text)


main = partial(
    core_cli.main,
    prog="tokenmix-nats-l",
    recipes="tokenmix_nats_l.recipes:RECIPES",
    suites="tokenmix_nats_l.evals:SUITES",
    commands=_add_commands,
    arguments=_add_types,
    using="tokenmix_nats_l.evals:using_types",
)


if __name__ == "__main__":
    sys.exit(main())
