"""The command `info`: print versions, recipes and suites, describe a model, or list the kernels for a chip."""

from __future__ import annotations

import argparse
import platform
import sys
import textwrap
from collections.abc import Mapping
from typing import Any

import torch
import yaml

from tokenmix_core._utils.trust import from_config
from tokenmix_core._utils.validation import described
from tokenmix_core._utils.versions import version_of
from tokenmix_core.cli.commands import Context, config_of
from tokenmix_core.evaluation.efficiency import device_name
from tokenmix_core.nn.registry import known_mixers
from tokenmix_core.ops.explanation import CHIPS, OPERATIONS, RAN, explain
from tokenmix_core.training.recipe import DataRecipe, OptimizerRecipe, Recipe, RunRecipe

LIBRARIES = ("torch", "triton", "transformers", "accelerate")
EXTRAS = (
    "datasets",
    "lm-eval",
    "matplotlib",
    "peft",
    "tensorboard",
    "wandb",
    "liger-kernel",
    "flash-attn",
    "flash-attn-4",
)
ABSENT = "not installed"


def info(args: argparse.Namespace, context: Context) -> None:
    """Print versions, recipes and suites, or describe a model, a recipe's fields or a chip's kernels."""
    if args.chip:
        lines = kernels_of(args.chip)
        untested = "" if args.chip in RAN else "; no test has run on it"
        print(f"{args.chip}: {CHIPS[args.chip]:,} bytes of shared memory a block{untested}")
        print(*(f"  {name:{max(map(len, lines))}}  {text}" for name, text in lines.items()), sep="\n")
        return
    if args.fields:
        if args.target not in context.recipes:
            raise ValueError(f"--fields shows those of a recipe, got {args.target!r}; `info` lists the recipes")
        print(describe_fields(context.recipe(args.target)))
        return
    if args.target is not None:
        print(describe_model(args.target, args.lengths, context))
        return
    ours = {name.replace("_", "-"): getattr(sys.modules[name], "__version__", "") for name in context.packages}
    versions = {**ours, "Python": platform.python_version(), **{name: version_of(name) or ABSENT for name in LIBRARIES}}
    print(", ".join(f"{name} {number}".rstrip() for name, number in versions.items()))
    gpus = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    print(f"device: {', '.join(map(device_name, gpus or [torch.device('cpu')]))}")
    here = [name for name in EXTRAS if version_of(name) is not None]
    absent = [name for name in EXTRAS if name not in here]
    print(f"optional libraries: {', '.join(here) or 'none'}; absent: {', '.join(absent) or 'none'}")
    for title, lines in (
        ("recipes", {name: make().description for name, make in context.recipes.items()}),
        ("suites", {name: suite.summary for name, suite in context.suites.items()}),
        ("mixers", dict.fromkeys(known_mixers(), "")),
        ("kernels that run here, of bfloat16 in usual sizes", kernels_of()),
    ):
        print(f"\n{title}")
        width = max(map(len, lines), default=0)
        for name, text in lines.items():
            print(f"  {name:{width}}  {text}".rstrip())


def kernels_of(chip: str | None = None) -> dict[str, str]:
    """For each registered operation, return which implementation runs on a chip (default: this machine's), and why."""
    found = {name: explain(name, chip=chip) for name in OPERATIONS}
    return {name: f"{what.impl}, as {what.why}" for name, what in found.items()}


def describe_fields(recipe: Recipe) -> str:
    """Return a recipe's fields as YAML for --config; comments describe them and list the model's further fields."""
    values, config = recipe.values(), recipe.model_config()
    texts = described(DataRecipe) | described(OptimizerRecipe) | described(RunRecipe)
    model, of_model = values.pop("model"), described(type(config))
    # leave out auto_map, which only transformers itself sets
    names = [name for name in of_model if name not in model and name != "auto_map"]
    others = {name: getattr(config, name) for name in names if hasattr(config, name)}
    return "\n".join(
        [
            _commented(values, texts),
            "model:",
            textwrap.indent(_commented(model, of_model), "  "),
            "  # further fields of the model:",
            textwrap.indent(_commented(others, of_model, value_prefix="# "), "  "),
        ]
    )


def _commented(values: Mapping[str, Any], texts: Mapping[str, str], *, value_prefix: str = "") -> str:
    lines, before = [], ""
    for name, value in values.items():
        # print a description that several fields share above the first of them
        if (text := texts.get(name, "")) != before:
            lines += [f"# {line}" for line in textwrap.wrap(text, 110)]
        before = text
        shown = yaml.safe_dump({name: value}, sort_keys=False, allow_unicode=True).rstrip()
        lines.append(textwrap.indent(shown, value_prefix))
    return "\n".join(lines)


def describe_model(target: str, lengths: tuple[int, ...], context: Context) -> str:
    """Return a text on parameters, layers and cache bytes of a recipe's or checkpoint's model; loads no weights."""
    from transformers import AutoModelForCausalLM

    config = config_of(target, context)
    with torch.device("meta"):
        model = from_config(AutoModelForCausalLM, config)
    facts = {
        "type": config.model_type,
        "parameters": f"{model.num_parameters():,}",
        "without embeddings": f"{model.num_parameters(exclude_embeddings=True):,}",
        "layers": f"{config.num_hidden_layers} of width {config.hidden_size}",
        "vocabulary": f"{config.vocab_size:,}",
    }
    if mixers := getattr(config, "mixers", None):
        facts["mixers"] = ", ".join(mixers)
    for length in lengths if hasattr(model, "state_bounds") else ():
        least, most = model.state_bounds(length, 1, torch.bfloat16)
        held = f"{most:,}" if least == most else f"{least:,} to {most:,}"
        facts[f"cache at {length:,}"] = f"{held} bytes for a sequence in bfloat16"
    return "\n".join([target, *(f"  {name:20} {fact}" for name, fact in facts.items())])
