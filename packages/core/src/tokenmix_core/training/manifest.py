"""The manifest of a run (`run.json`), and the recipe of a run that is resumed."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenmix_core._utils.versions import commit_of
from tokenmix_core.data.prepare import TrainedOn
from tokenmix_core.data.tokenizer import BYTES
from tokenmix_core.training.overrides import overridden
from tokenmix_core.training.recipe import Recipe

if TYPE_CHECKING:
    from tokenmix_core.training.engine import RecipeTrainer

RUN_MANIFEST = "run.json"


def run_manifest(recipe: Recipe, trainer: RecipeTrainer) -> dict[str, Any]:
    """Return the manifest of a run as plain data: recipe, corpora, device and versions of software."""
    import torch
    import transformers

    from tokenmix_core.training.engine import device_name
    from tokenmix_core.training.sharding import POLICY

    args, model = trainer.args, trainer.model
    rows: Any = trainer.train_dataset
    assert model is not None
    # versions of core and of the package that defines the model
    packages = [sys.modules[name] for name in ("tokenmix_core", type(model).__module__.partition(".")[0])]
    return {
        "recipe": recipe.name,
        "values": recipe.values(),
        "identity": trainer.identity,
        "corpora": [
            {key: file.meta.source.get(key) for key in ("corpus", "python", "split")}
            for file in rows.token_files
            if file.meta.source.get("corpus") is not None
        ],
        "parameters": sum(p.numel() for p in model.parameters()),
        "processes": args.world_size,
        "fsdp": {**POLICY, "reshard": trainer.reshard, "unit_layers": trainer.unit_layers} if args.fsdp else None,
        "device": device_name(args),
        "versions": {
            "python": platform.python_version(),
            **{package.__name__: package.__version__ for package in packages if hasattr(package, "__version__")},
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "commit": commit_of(Path(__file__)),
    }


def read_manifest(output_dir: str | Path) -> dict[str, Any]:
    """Return the manifest of the run in a folder.

    Raises:
        ValueError: the folder has no manifest, or it cannot be read.
    """
    path = Path(output_dir) / RUN_MANIFEST
    if not path.is_file():
        raise ValueError(f"{output_dir} has no {RUN_MANIFEST}, the manifest of a run; name its recipe, too")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        return {**manifest, "recipe": str(manifest["recipe"]), "values": dict(manifest["values"])}
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(
            f"{path} is damaged ({type(error).__name__}); remove it and give the fields of the run again to continue"
        ) from error


def trained_on(folder: str | Path) -> TrainedOn:
    """Describe the text that a run was trained on by its manifest in `folder` or, for a checkpoint, in its parent.

    Without a manifest the description is empty.
    """
    for path in (Path(folder), Path(folder).parent):
        if (path / RUN_MANIFEST).is_file():
            manifest = read_manifest(path)
            identity, values = manifest.get("identity"), manifest["values"]
            data = identity.get("data") if isinstance(identity, dict) else None
            known = {str(k): str(v) for k, v in data.items()} if isinstance(data, dict) else {}
            sources, corpora = values.get("sources"), manifest.get("corpora")
            return TrainedOn(
                known,
                [str(source) for source in sources] if isinstance(sources, list) else [],
                str(values.get("tokenizer", BYTES)),
                [corpus for corpus in corpora if isinstance(corpus, dict)] if isinstance(corpora, list) else [],
            )
    return TrainedOn()


def resumed(
    recipe: Recipe, output_dir: str | Path, flags: Sequence[str] = (), config: str | Path | None = None
) -> Recipe:
    """Return the recipe of the run in a folder, so that its fields need not be given again.

    Flags, and fields of a file, may change how the run is executed, but no field on which its loss curve depends. If
    the folder has no manifest, the returned recipe is `recipe` with these flags and fields; the checkpoint is still
    compared with it.

    Args:
        recipe: the recipe with which the run was started, before any of its fields was overridden.
        output_dir: the folder of the run.
        flags, config: as for `overridden`.

    Raises:
        ValueError: the manifest cannot be read or belongs to another recipe, or a given field contradicts it.
    """
    path = Path(output_dir) / RUN_MANIFEST
    if not path.is_file():
        return overridden(recipe, flags, config)
    manifest = read_manifest(output_dir)
    name, values = manifest["recipe"], manifest["values"]
    if name != recipe.name:
        raise ValueError(f"{path.parent} holds a run of the recipe {name!r}, not of {recipe.name!r}")
    try:
        begun = overridden(recipe, (), values)
    except ValueError as error:
        raise ValueError(f"{path} holds what the recipe {name!r} cannot take: {error}") from error
    made = overridden(begun, flags, config)
    # leave out the sources: token files may have been moved, and checkpoints are compared by the files' contents
    was, now = ({k: v for k, v in x.identity().items() if k != "sources"} for x in (begun, made))
    if differing := sorted(k for k in was if was[k] != now[k]):
        told = "; ".join(f"{k} was {was[k]!r} and is {now[k]!r}" for k in differing)
        raise ValueError(
            f"{path.parent} cannot continue with other fields ({told}); leave them out, or begin a run in a new folder"
        )
    return made
