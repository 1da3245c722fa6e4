"""Publish a trained model: write its model card, and upload the folder to the hub."""

from __future__ import annotations

import argparse
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import AutoModelForCausalLM

import tokenmix_core
from tokenmix_core._utils.atomic_io import write_atomically
from tokenmix_core._utils.trust import from_config
from tokenmix_core.cli.commands import Context, config_of, is_checkpoint, load_model
from tokenmix_core.evaluation.report import format_rows, format_settings, format_table
from tokenmix_core.modeling.checkpoint import COMPANIONS
from tokenmix_core.nn.registry import find_mixer
from tokenmix_core.training.manifest import RUN_MANIFEST

CARD = "README.md"
# a model card with this line was written by this module
MARK = "<!-- written by tokenmix push -->"
# files to upload, without logs and manifests: these contain local paths, and the card repeats their content
UPLOADED = (
    CARD, "config.json", "generation_config.json", "*.safetensors", "*.safetensors.index.json", *COMPANIONS,
    "evaluation/*.png",
)  # fmt: skip


def push(args: argparse.Namespace, context: Context) -> None:
    """Run `tokenmix push`: write a model card, and upload the folder."""
    from huggingface_hub.utils import validate_repo_id

    folder = Path(args.checkpoint)
    if not is_checkpoint(folder):
        raise ValueError(f"{folder} holds no model: expected a folder with config.json and weights")
    validate_repo_id(args.repo)
    path = folder / CARD
    if not args.keep_card:
        if path.exists() and MARK not in path.read_text(encoding="utf-8"):
            raise ValueError(f"{path} is not a card that push wrote: move it away, or keep it with --keep-card")
        write_atomically(path, model_card(folder, args.repo, context, license=args.license))
    elif not path.is_file():
        raise ValueError(f"--keep-card: there is no {path}")
    if args.dry_run:
        print(f"{path}: the model card; nothing was uploaded")
        return
    # raise an error for a model that cannot be loaded: it must not be published
    load_model(folder, torch.device("cpu"), torch.float32)
    print(upload(folder, args.repo, private=args.private))


def upload(folder: Path, repo: str, *, private: bool = False) -> str:
    """Upload a folder's model, tokenizer, card and evaluations to a repository of the hub; return the address.

    `private` decides whether a new repository is private.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    api.create_repo(repo, private=private, exist_ok=True)
    done = api.upload_folder(
        repo_id=repo, folder_path=folder, allow_patterns=list(UPLOADED), ignore_patterns=["checkpoint-*/*"],
        commit_message=f"Upload by tokenmix-core {tokenmix_core.__version__}",
    )  # fmt: skip
    return str(getattr(done, "commit_url", done))


def model_card(folder: Path, repo: str, context: Context, *, license: str | None = None) -> str:
    """Return the Markdown card of a folder's model: its type, how to load it, its recipe, data and scores.

    Args:
        folder: the model's folder, with `run.json` and `evaluation/` if a run wrote them.
        repo: the model's name on the hub.
        context: recipes and suites of the package whose command runs.
        license: identifier of the model's license, such as "apache-2.0".

    Raises:
        ValueError: a configuration or a manifest of the run that cannot be read.
    """
    config = config_of(str(folder), context)
    head: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": "text-generation"}
    head |= {"tags": ["tokenmix", *_mixers(config)]} | ({"license": license} if license else {})
    parts = [
        f"---\n{yaml.safe_dump(head, sort_keys=False).strip()}\n---",
        MARK,
        f"# {repo.rpartition('/')[2]}",
        _what(config),
        "## Load it",
        _loading(config, repo),
        *_recipe(folder),
        *_scores(folder),
    ]
    return "\n\n".join(parts) + "\n"


def _mixers(config: Any) -> dict[str, int]:
    """Return the number of layers with each type of mixer."""
    return dict(Counter(map(config.mixer_type, range(config.num_hidden_layers)))) if hasattr(config, "labels") else {}


def _what(config: Any) -> str:
    with torch.device("meta"):
        model = from_config(AutoModelForCausalLM, config)
    layers = ", ".join(f"{count} of {name}" for name, count in _mixers(config).items())
    rows = {
        "model type": config.model_type,
        "parameters": f"{model.num_parameters():,}",
        "layers": f"{config.num_hidden_layers}{f': {layers}' if layers else ''}",
        "width": f"{config.hidden_size:,}",
        "vocabulary": f"{config.vocab_size:,}",
    }
    return format_table([{"": name, "this model": fact} for name, fact in rows.items()])


def _loading(config: Any, repo: str) -> str:
    homes = [type(config).__module__, *(find_mixer(name).__module__ for name in _mixers(config))]
    # importing a package registers the models that it announces; a model of core may also need the module of a
    # mixer
    imports = {"import tokenmix_core": None}
    for home in homes:
        package = home.partition(".")[0]
        if package.startswith("tokenmix_") and package != "tokenmix_core":
            imports[f"import {package}"] = None
            if home != type(config).__module__ and type(config).__module__.startswith("tokenmix_core"):
                imports[f"import {home}"] = None
    packages = dict.fromkeys(line.split()[1].partition(".")[0].replace("_", "-") for line in imports)
    lines = [
        f"# pip install {' '.join(packages)}", *imports, "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "", f'model = AutoModelForCausalLM.from_pretrained("{repo}")',
        f'tokenizer = AutoTokenizer.from_pretrained("{repo}")',
        'inputs = tokenizer("Once upon a time", return_tensors="pt")',
        "print(tokenizer.decode(model.generate(**inputs, max_new_tokens=50)[0]))",
    ]  # fmt: skip
    return "```python\n" + "\n".join(lines) + "\n```"


def _recipe(folder: Path) -> list[str]:
    """Return the card's sections on recipe and data; empty if the folder has no manifest of a run.

    Raises:
        ValueError: the manifest is damaged.
    """
    path = folder / RUN_MANIFEST
    if not path.is_file():
        return []
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        name, values, data = manifest["recipe"], dict(manifest["values"]), dict(manifest["identity"]["data"])
        versions = ", ".join(f"{library} {number}" for library, number in manifest["versions"].items())
        hardware = f"{manifest['device']}, processes: {manifest['processes']}"
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{path} is damaged ({type(error).__name__}); move it away to write a card without it"
        ) from None
    fields = yaml.safe_dump(_without_paths(values), sort_keys=False, allow_unicode=True).strip()
    rows = [{"source": source, "fingerprint": fingerprint} for source, fingerprint in data.items()]
    return [
        "## Recipe", f"Trained by the recipe `{name}` on {hardware}; {versions}.", f"```yaml\n{fields}\n```",
        "## Data", "The fingerprint of a source is the sha256 of its tokens: the same one is the same data.",
        format_table(rows),
    ]  # fmt: skip


def _without_paths(value: Any) -> Any:
    """Replace absolute paths and paths of folders by their last part: a card must not show the author's local paths."""
    if isinstance(value, dict):
        return {name: _without_paths(x) for name, x in value.items()}
    if isinstance(value, list | tuple):
        return [_without_paths(x) for x in value]
    return Path(value).name if isinstance(value, str) and (os.path.isabs(value) or Path(value).is_dir()) else value


def _scores(folder: Path) -> list[str]:
    parts = []
    for path in sorted((folder / "evaluation").glob("*.json")):
        try:
            result = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} is damaged: {error}") from error
        if isinstance(result, dict) and result.get("rows") and {"suite", "settings", "plots"} <= set(result):
            settings = format_settings(_without_paths(result["settings"]))
            parts += [f"### {result['suite']}", *([settings] if settings else []), format_rows(result["rows"])]
            if (picture := path.with_suffix(".png")).is_file():
                parts.append(f"![{result['suite']}](evaluation/{picture.name})")
    return ["## Scores", *parts] if parts else []
