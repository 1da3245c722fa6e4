"""The command `finetune` of packages that convert pretrained models; it trains the model in a folder further."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenmix_core.cli.app import AddCommand
    from tokenmix_core.training.recipe import Recipe


def add_finetune(
    add: AddCommand, summary: str, example: str, run: str, *, required: str = ""
) -> argparse.ArgumentParser:
    """Add the command `finetune CHECKPOINT --out DIR`, whose flags may set fields of its recipe; return its parser.

    Args:
        add: the function `add` that `main` passes to its argument `commands`.
        summary, example, run: arguments of `add`: the command's summary, an example, and "module:function".
        required: text of the usage line for further required arguments.
    """
    sub = add("finetune", summary, example, run, takes_fields=True)
    needed = " ".join(filter(None, ("CHECKPOINT", required, "--out DIR")))
    # the usage is written by hand, because argparse does not know CHECKPOINT: `_arguments` takes it from the remaining
    # arguments, as `train` takes RECIPE
    sub.usage = f"{sub.prog} {needed} [--config FILE] [--FIELD VALUE ...]\n       {sub.prog} --resume DIR"
    sub.description = f"{sub.description} CHECKPOINT is the folder of a converted model; --FIELD VALUE as in train."
    sub.set_defaults(needed=needed)
    sub.add_argument("--out", type=Path, metavar="DIR", help="folder of the run")
    resume = "continue from the last checkpoint of the run in DIR (or --out), with the run's own settings"
    sub.add_argument("--resume", nargs="?", const=True, metavar="DIR", help=resume)
    sub.add_argument("--config", type=Path, metavar="FILE", help="YAML file with fields of the recipe")
    return sub


def run_finetune(
    args: argparse.Namespace,
    defaults: Mapping[str, Any],
    recipe_of: Callable[..., Recipe],
    finish: Callable[[Mapping[str, Any], Path], Path] = lambda settings, folder: folder,
) -> int:
    """Run the command `finetune` and return its exit code.

    Args:
        args: the parsed arguments.
        defaults: the package's own settings, by the names of their arguments; None if a setting has no default.
            `--resume` reads them from the run's manifest.
        recipe_of: takes the checkpoint, and the settings as keyword arguments; returns the recipe to run.
        finish: takes the settings with the checkpoint, and the folder of the trained model; returns the folder of the
            final model, which may be made from the trained one.
    """
    from tokenmix_core.cli.commands import end_of_training, is_checkpoint
    from tokenmix_core.training.folder import run_lock
    from tokenmix_core.training.manifest import resumed
    from tokenmix_core.training.overrides import overridden
    from tokenmix_core.training.ranks import together
    from tokenmix_core.training.trainer import train_locked

    settings, out, fields = _arguments(args, defaults)
    if not is_checkpoint(settings["checkpoint"]):
        raise ValueError(f"{settings['checkpoint']} holds no model: expected a folder with config.json and weights")
    recipe, resume = recipe_of(**settings), bool(args.resume)
    recipe = resumed(recipe, out, fields, args.config) if resume else overridden(recipe, fields, args.config)
    # hold the lock until `finish` has written its model
    with ExitStack() as held:
        with together(recipe.run.rank_timeout):
            held.enter_context(run_lock(out, resume=resume))
            result = train_locked(recipe, out, resume=resume, recorded={"finetune": settings})
        if (code := end_of_training(args, result)) is not None:
            return code
        folder = finish(settings, result.model_dir)
    print(f"trained {result.step} steps in {result.seconds:.0f} s; the model is in {folder}")
    return 0


def _arguments(args: argparse.Namespace, defaults: Mapping[str, Any]) -> tuple[dict[str, Any], Path, list[str]]:
    """Return the settings with the checkpoint, the run's folder, and the flags that set fields of the recipe.

    With `--resume`, values that the command line does not give come from the run's manifest.

    Raises:
        ValueError: the folder, the checkpoint or a required setting is neither given nor in the manifest.
    """
    from tokenmix_core.training.manifest import read_manifest

    fields = list(args.rest)
    given = {"checkpoint": fields.pop(0) if fields and not fields[0].startswith("-") else None}
    given |= {name: getattr(args, name) for name in defaults}
    out = Path(args.resume) if isinstance(args.resume, str) else args.out
    if out is None:
        raise ValueError("give the folder of the run: --out DIR, or --resume DIR to go on with one")
    saved = read_manifest(out).get("finetune", {}) if args.resume else {}
    settings = {"checkpoint": None, **defaults, **saved}
    settings |= {name: value for name, value in given.items() if value is not None}
    if absent := [name for name, value in settings.items() if value is None]:
        raise ValueError(f"finetune needs {' and '.join(absent)}: {args.needed}")
    return settings, out, fields
