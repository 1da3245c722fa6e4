"""The command `tokenmix-nha`: core's command line with this package's recipes and suites, and its own commands."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

from tokenmix_core import cli as core_cli


def _add_commands(add: core_cli.AddCommand) -> None:
    sub = add(
        "convert",
        "replace the attention of a pretrained transformer by NHA, or read FLA's GLA and GSA models",
        "models/Llama-3.2-1B --full-layers 0,8 --slots 64 --window 32 --out converted",
        "tokenmix_nha.conversion:command",
    )
    sub.add_argument("model", metavar="MODEL", help="folder of a Llama, Qwen2, Qwen3, Qwen3-MoE, GLA or GSA checkpoint")
    sub.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to make")
    sub.add_argument(
        "--full-layers",
        type=_indices,
        default=(),
        metavar="I,I",
        help="layers with full attention; `all` for every layer",
    )
    sub.add_argument("--slots", type=int, default=64, metavar="M", help="slots of every key head; 0 for none")
    sub.add_argument("--window", type=int, default=32, metavar="W", help="window of the other layers, in tokens")
    sub.add_argument("--dtype", default="auto", help="float32, bfloat16 or float16 (default: as the checkpoint has it)")

    sub = core_cli.add_finetune(
        add,
        "train a converted model: its attention alone (stage 1), then everything through LoRA (stage 2)",
        "converted --stage 1 --out runs/stage1 --sources data/slimpajama",
        "tokenmix_nha.finetune:command",
        required="--stage 1|2",
    )
    sub.add_argument("--stage", type=int, choices=(1, 2), help="1: attention, FFN frozen; 2: LoRA")
    sub.add_argument("--rank", type=int, metavar="R", help="rank of LoRA (default: 16)")

    sub = add(
        "search",
        "find which layers should be full, by windows at inference alone",
        "runs/tiny-random --task mqar --lengths 256 --max-full 1",
        "tokenmix_nha.search:command",
    )
    sub.add_argument(
        "checkpoint", metavar="CHECKPOINT", help="folder of an NHA model, best one trained with drawn windows"
    )
    sub.add_argument("--task", required=True, metavar="SUITE[:A,B]", help="a suite, or some of its tasks, to score by")
    sub.add_argument(
        "--window", type=int, metavar="W", help="window of the other layers (default: the smallest in the config)"
    )
    sub.add_argument(
        "--blocks",
        type=core_cli.positive_integers,
        metavar="N,N",
        help="try one full layer in every N, at each position (default: those of 8,6,4,3,2 that fit the model)",
    )
    sub.add_argument("--insert", type=int, default=1, metavar="N", help="full layers to add greedily to the sparsest")
    sub.add_argument(
        "--max-full",
        type=int,
        metavar="N",
        help="most full layers of the result (default: the sparsest pattern's and --insert)",
    )
    sub.add_argument("--out", type=Path, metavar="DIR", help="folder for the results (default: CHECKPOINT/search)")
    sub.add_argument("--resume", action="store_true", help="reuse the scores of an interrupted search in the folder")
    core_cli.add_eval_options(sub)


def _indices(text: str) -> tuple[int, ...] | str:
    if text in ("all", "none"):
        return text if text == "all" else ()
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected layers separated by commas, all or none, got {text!r}") from None


main = partial(
    core_cli.main,
    prog="tokenmix-nha",
    recipes="tokenmix_nha.recipes:RECIPES",
    suites="tokenmix_nha.evals:SUITES",
    commands=_add_commands,
)


if __name__ == "__main__":
    sys.exit(main())
