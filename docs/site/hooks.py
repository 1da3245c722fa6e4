"""Hand the repository's Markdown files to mkdocs under their own paths, and make the pages of docstrings and recipes.

A page has the path of its file, so that relative links work on the site as they do in the repository.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import states  # noqa: E402

PACKAGES = {path.parent.name: f"tokenmix_{path.parent.name}" for path in sorted(ROOT.glob("packages/*/pyproject.toml"))}
# pages, and the files that they show or link to
_TAKEN = re.compile(
    r"(README|CONTRIBUTING)\.md|docs/(?!site/)|examples/|arena/((README|RULES)\.md|results/.*\.(md|png))"
    r"|packages/\w+/(README\.md|figures/|src/.*\.(md|png))"
)


def on_config(config: Any) -> Any:
    """Fill the sections of the navigation that mkdocs.yml leaves empty."""
    generated = {
        "Operations": [*({path.parent.name: uri} for path, uri in operations()), {"others": "operations.md"}],
        "Reference": [{name: uri} for name, uri, _ in reference()],
        "Log": [{title: f"docs/{uri}"} for title, uri in log()],
    }
    config.nav = [_filled(entry, generated) for entry in config.nav]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the files of the repository and the generated pages."""
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    pages: dict[str, str] = {"mixers.md": mixers_page(), "recipes.md": recipes_page()}
    pages |= {uri: text for _, uri, text in reference()}
    pages |= {uri: path.read_text(encoding="utf-8") for path, uri in operations()}
    pages["operations.md"] = "# Operations without a derivation of their own\n"
    for uri, names in public_functions().items():
        pages[uri] += "\n\n".join(["", "## Functions", *(f"::: {name}" for name in names), ""])
    for uri, text in pages.items():
        files.append(File.generated(config, uri, content=text))
    for uri in tracked:
        if _TAKEN.match(uri) and uri not in pages and (ROOT / uri).is_file():
            files.append(File.generated(config, uri, abs_src_path=str(ROOT / uri)))
    return files


def _filled(entry: Any, generated: dict[str, list]) -> Any:
    """Return an entry of the navigation with empty entries replaced by generated ones."""
    if not isinstance(entry, dict):
        return entry
    ((title, value),) = entry.items()
    if isinstance(value, list):
        value = [_filled(inner, generated) for inner in value]
    return {title: value or generated[title]}


def operations() -> list[tuple[Path, str]]:
    """Return the README of each operation with its address."""
    found = sorted(ROOT.glob("packages/*/src/*/ops/**/README.md"), key=lambda path: path.parent.name)
    return [(path, path.relative_to(ROOT).as_posix()) for path in found]


def log() -> list[tuple[str, str]]:
    """Return title and address of the log's files in the order of their index."""
    index = (ROOT / "docs" / "log.md").read_text(encoding="utf-8")
    return re.findall(r"(?m)^\| \[([^\]]+)\]\((log/\w+\.md)\)", index)


def public_functions() -> dict[str, list[str]]:
    """Return the full names of the operations' public functions by the page that documents them."""
    found: dict[str, list[str]] = {}
    readmes = {path.parent: uri for path, uri in operations()}
    for module in PACKAGES.values():
        if importlib.util.find_spec(f"{module}.ops") is None:
            continue
        ops = importlib.import_module(f"{module}.ops")
        for value in (getattr(ops, name) for name in ops.__all__):
            if callable(value) and value.__module__.startswith(f"{module}.ops."):
                folders = Path(sys.modules[value.__module__].__file__ or "").parents
                uri = next((readmes[folder] for folder in folders if folder in readmes), "operations.md")
                found.setdefault(uri, []).append(f"{value.__module__}.{value.__name__}")
    return found


def mixers_page() -> str:
    """Return the page of all mixers: the name that a configuration uses, the package and the docstring."""
    parts = ["# Mixers", "A layer's mixer is named in `mixers` of the model's configuration, its options in"]
    parts[-1] += " `mixer_options`. [Choose a mixer](docs/choose.md) says which to take."
    for name, mixer in states.mixers().items():
        package = mixer.__module__.partition(".")[0].replace("_", "-")
        options = "    options:\n      members: []\n      skip_local_inventory: true\n      show_root_heading: false"
        parts += [f"## {name}", f"Package `{package}`.", f"::: {mixer.__module__}.{mixer.__qualname__}\n{options}"]
    return "\n\n".join(parts) + "\n"


def recipes_page() -> str:
    """Return the page of all recipes of all packages."""
    parts = ["# Recipes", "`tokenmix info RECIPE --fields` prints every field of a recipe of core."]
    for name, module in PACKAGES.items():
        found = importlib.import_module(f"{module}.training.baselines" if name == "core" else f"{module}.recipes")
        rows = [f"| `{recipe}` | {make().description} |" for recipe, make in found.RECIPES.items()]
        command = module.replace("_", "-").removesuffix("-core")
        parts += [f"## {command}", "\n".join([f"| `{command} train` | what it trains |", "|---|---|", *rows])]
    return "\n\n".join(parts) + "\n"


def reference() -> Iterator[tuple[str, str, str]]:
    """Yield title, address and text of a page for each package, and for each layer of core."""
    for name, module in PACKAGES.items():
        root = ROOT / "packages" / name / "src" / module
        layers = [root, *(path.parent for path in sorted(root.glob("[a-z]*/__init__.py")) if name == "core")]
        for layer in layers:
            title = module if layer == root else f"{module}.{layer.name}"
            # an operation's functions are on its own page
            files = [path for path in sorted(layer.glob("[a-z]*.py")) if layer.name != "ops"]
            if files:
                blocks = [f"::: {title}.{path.stem}\n    options:\n      heading_level: 2" for path in files]
                yield title, f"reference/{title}.md", "\n\n".join([f"# {title}", *blocks]) + "\n"
