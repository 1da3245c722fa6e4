"""The pages of the site, made from what the repository holds: READMEs, docstrings, measurements, the arena's reports.

Nothing is written twice: a page is a README with its links turned to other pages, or is put together from docstrings,
registries and results. What a link of a README points to and the site does not have, it loses its link.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import posixpath
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from equations import element, with_equations

ROOT = Path(__file__).parents[2]
PACKAGES = {path.parent.name: f"tokenmix_{path.parent.name}" for path in sorted(ROOT.glob("packages/*/pyproject.toml"))}
PAPERS = {"nha": "NHA", "oryx": "Oryx", "lte": "LTE", "nats_l": "NAtS-L"}
# the section of core's README that has a page of its own
KERNELS = "Use our kernels in your model"
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)\)")
_FENCE = re.compile(r"(?ms)^(```|~~~~).*?^\1[ \t]*$")
_IMAGES = (".png", ".svg")


@dataclass
class Site:
    """All that the site is made of.

    Attributes:
        pages: Markdown by address.
        files: pictures by address, as files of the repository.
        nav: titles and addresses, in mkdocs' form.
    """

    pages: dict[str, str] = field(default_factory=dict)
    files: dict[str, Path] = field(default_factory=dict)
    nav: list[Any] = field(default_factory=list)


def build() -> Site:
    """All pages."""
    site = Site()
    start = [
        {"Overview": _readme(site, "README.md")},
        {"Choose a mixer": _put(site, "choose.md", _choose(site))},
        {KERNELS: _put(site, "kernels.md", _kernels(site))},
        {"Train on your own text": _readme(site, "docs/training.md")},
        {"Write a mixer": _readme(site, "docs/custom_mixer.md")},
        {"Examples": _put(site, addresses()["examples/README.md"], _examples(site))},
        {"Notation": _readme(site, "docs/notation.md")},
        {"Architecture": _readme(site, "docs/architecture.md")},
    ]
    site.nav = [
        {"Start": start},
        {"Operations": [{name: _put(site, f"operations/{name}.md", text)} for name, text in _operations(site)]},
        {"Mixers": [{name: _put(site, f"mixers/{name}.md", text)} for name, text in _mixers()]},
        {
            "Papers": [
                {title: _put(site, f"papers/{name}.md", _paper(site, name, title))} for name, title in PAPERS.items()
            ]
        },
        {"Arena": [{"The rule": _readme(site, "arena/README.md")}, *_arena(site)]},
        {
            "Core": [
                {"tokenmix-core": _readme(site, "packages/core/README.md")},
                {"The model": _readme(site, "packages/core/src/tokenmix_core/modeling/README.md")},
            ]
        },
        {
            "Measurements": [
                {"Speed": _readme(site, "docs/speed.md")},
                {"Training steps": _readme(site, "docs/step_time.md")},
                {"Other people's models": _readme(site, "docs/integrations.md")},
                {"Versions of Triton": _readme(site, "docs/triton_versions.md")},
                {"Hopper and its compilers": _readme(site, "docs/hopper.md")},
                {"Log": [{"What it holds": _readme(site, "docs/log.md")}, *_log(site)]},
            ]
        },
        {"Reference": [{name: _put(site, f"reference/{name}.md", text)} for name, text in _reference()]},
        {"Contributing": _readme(site, "CONTRIBUTING.md")},
    ]
    return site


@cache
def addresses() -> dict[str, str]:
    """The page of each file of the repository that has one, with its place there where it begins below the top."""
    found = {
        "README.md": "index.md",
        "CONTRIBUTING.md": "contributing.md",
        "examples/README.md": "examples.md",
        "arena/README.md": "arena/index.md",
        "packages/core/README.md": "core/index.md",
        "packages/core/src/tokenmix_core/modeling/README.md": "core/modeling.md",
    }
    found |= {
        f"docs/{name}.md": f"{name}.md"
        for name in (
            "training",
            "custom_mixer",
            "notation",
            "architecture",
            "speed",
            "step_time",
            "integrations",
            "triton_versions",
            "hopper",
            "log",
        )
    }
    found |= {f"docs/log/{path.name}": f"log/{path.name}" for path in sorted(ROOT.glob("docs/log/*.md"))}
    for name, title in PAPERS.items():
        found[f"packages/{name}/README.md"] = f"papers/{name}.md"
        found[f"docs/{name}.md"] = f"papers/{name}.md#{_slug(_title(ROOT / 'docs' / f'{name}.md') or title)}"
    for folder, name in operation_folders().items():
        found[f"{folder}/README.md"] = f"operations/{name}.md"
    for report in sorted(ROOT.glob("arena/results/*/report.md")):
        found[report.relative_to(ROOT).as_posix()] = f"arena/{report.parent.name}.md"
    # a folder is its README, the log's its index
    found["docs/log"] = "log.md"
    return found | {posixpath.dirname(path): uri for path, uri in found.items() if path.endswith("/README.md")}


@cache
def operation_folders() -> dict[str, str]:
    """The folders of operations, with the names of their pages."""
    folders = sorted(path.parent for path in ROOT.glob("packages/*/src/*/ops/*/__init__.py"))
    return {folder.relative_to(ROOT).as_posix(): folder.name for folder in folders}


def _put(site: Site, uri: str, text: str) -> str:
    site.pages[uri] = text
    return uri


def _readme(site: Site, source: str) -> str:
    """A file of the repository as a page; returns its address."""
    uri = addresses()[source]
    return _put(site, uri, _text(site, source, uri))


def _examples(site: Site) -> str:
    """The list of examples, then each script."""
    parts = [_text(site, "examples/README.md", addresses()["examples/README.md"])]
    for path in sorted(ROOT.glob("examples/*.py")):
        parts.append(f"## {path.name}\n\n```python\n{path.read_text(encoding='utf-8')}```\n")
    return "\n".join(parts)


def _text(site: Site, source: str, uri: str) -> str:
    """A Markdown file as it stands on a page: equations typeset, links turned to pages, pictures taken along."""
    text = (ROOT / source).read_text(encoding="utf-8")

    def rotated(link: re.Match[str]) -> str:
        image, shown, target = link.groups()
        if re.match(r"[a-z]+:|#", target):
            return link[0]
        path, _, anchor = target.partition("#")
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        if image or path.endswith(_IMAGES):
            where = f"files/{path}"
            site.files[where] = ROOT / path
            return f"{image}[{shown}]({_relative(where, uri)})"
        if path not in addresses():
            return shown
        page, _, place = addresses()[path].partition("#")
        place = anchor or place
        return f"[{shown}]({_relative(page, uri)}{f'#{place}' if place else ''})"

    parts, end = [], 0
    for fence in _FENCE.finditer(text):
        parts += [_LINK.sub(rotated, text[end : fence.start()]), fence[0]]
        end = fence.end()
    return with_equations("".join([*parts, _LINK.sub(rotated, text[end:])]))


def _relative(uri: str, of: str) -> str:
    return posixpath.relpath(uri, posixpath.dirname(of) or ".")


def _title(path: Path) -> str:
    heading = next((line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("# ")), "")
    return heading.removeprefix("# ")


def _slug(title: str) -> str:
    """A heading's anchor, as GitHub and the site make it."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def _deeper(text: str) -> str:
    """A text with its headings one level down."""
    parts, end = [], 0
    for fence in _FENCE.finditer(text):
        parts += [re.sub(r"(?m)^#", "##", text[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, re.sub(r"(?m)^#", "##", text[end:])])


def _section(text: str, heading: str) -> str | None:
    """A section of the second level without its heading; None where there is none."""
    found = re.search(rf"(?ms)^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", text)
    return found[1].strip() if found else None


def _kernels(site: Site) -> str:
    section = _section(_text(site, "packages/core/README.md", "kernels.md"), KERNELS)
    functions = _functions("core", None)
    body = section or "Every operation is a function of tensors; it knows no model. Its page says shapes and errors."
    lines = [f"- [`{f.__name__}`](operations/{folder}.md): {_summary(f)}" for folder, f in functions]
    return "\n\n".join([f"# {KERNELS}", body, "## All operations of core", "\n".join(lines)]) + "\n"


def _choose(site: Site) -> str:
    """What to take, from the arena's pictures where a size that says something was run."""
    parts = ["# Choose a mixer"]
    shown = False
    for report in sorted(ROOT.glob("arena/results/*/report.md")):
        source = report.relative_to(ROOT).as_posix()
        text = _text(site, source, "choose.md")
        if "**Smoke run.**" in text:
            continue
        pictures = re.findall(r"(?m)^!\[.*$", text)
        claims = _section(text, "Which claims held")
        if pictures:
            shown = True
            parts += [f"## At the size {report.parent.name}", *pictures]
            parts += [claims] if claims else []
            parts.append(f"[All tables]({_relative(addresses()[source], 'choose.md')})")
    if not shown:
        parts.append(
            "The [arena](arena/index.md) trains all of them under one rule. **Not measured**: none of its runs that "
            "could say something has been made yet, so nothing is recommended here. What each keeps of a text, counted "
            "and not measured, is below."
        )
    parts += ["## What each keeps", _states()]
    return "\n\n".join(parts) + "\n"


def _arena(site: Site) -> list[dict[str, str]]:
    reports = sorted(ROOT.glob("arena/results/*/report.md"))
    return [{path.parent.name: _readme(site, path.relative_to(ROOT).as_posix())} for path in reports]


def _log(site: Site) -> list[dict[str, str]]:
    """The files of the log in the order of its index, under the titles that it gives them."""
    index = (ROOT / "docs" / "log.md").read_text(encoding="utf-8")
    listed = re.findall(r"(?m)^\| \[([^\]]+)\]\((log/\w+\.md)\)", index)
    return [{title: _readme(site, f"docs/{path}")} for title, path in listed]


def _operations(site: Site) -> Iterator[tuple[str, str]]:
    """By name: the derivation, where it runs, its functions, its speed."""
    for folder, name in operation_folders().items():
        package = folder.split("/")[1]
        readme = f"{folder}/README.md"
        uri = f"operations/{name}.md"
        functions = [f for where, f in _functions(package, name) if where == name]
        if (ROOT / readme).is_file():
            parts = [_text(site, readme, uri).rstrip()]
        else:
            parts = [f"# {name}", *(_summary(f) for f in functions[:1])]
        parts += ["## Which kernels run where", _where(ROOT / folder)]
        if functions:
            parts.append("## Functions")
            parts += [f"::: {f.__module__}.{f.__name__}" for f in functions]
        if rows := _speed(package, (name, *(f.__name__ for f in functions))):
            from tokenmix_core.testing import results

            parts += ["## Speed", results.markdown(rows)]
        else:
            parts += ["## Speed", "Not measured."]
        yield name, "\n\n".join(parts) + "\n"


def _functions(package: str, folder: str | None) -> list[tuple[str, Any]]:
    """The public functions and types of a package's operations, each with the folder that it is in."""
    module = importlib.import_module(f"{PACKAGES[package]}.ops")
    found = []
    for name in module.__all__:
        value = getattr(module, name)
        if not callable(value):
            continue
        parts = value.__module__.split(".")
        if len(parts) > 3 and (folder is None or parts[2] == folder):
            found.append((parts[2], value))
    return found


def _where(folder: Path) -> str:
    """What an operation has for each kind of device, from the files that it is made of."""
    gluon = (folder / "hopper").is_dir() or "gluon" in _source(folder)
    triton = "@triton.jit" in _source(folder)
    rows = [("any other, and in float64", "the eager reference")]
    if triton:
        rows.insert(0, ("a CUDA device", "portable Triton"))
    if gluon:
        rows.insert(0, ("Hopper, Triton 3.6 and newer", "Gluon"))
        rows[1] = ("another CUDA device", "portable Triton")
    lines = ["| device | kernels |", "|---|---|", *(f"| {device} | {kernels} |" for device, kernels in rows)]
    return "\n".join(lines) + "\n\n`tokenmix info` and `tokenmix_core.ops.explain` say what runs on a machine, and why."


@cache
def _source(folder: Path) -> str:
    return "\n".join(path.read_text(encoding="utf-8") for path in sorted(folder.rglob("*.py")))


def _speed(package: str, names: tuple[str, ...]) -> list[dict[str, Any]]:
    files = sorted((ROOT / "packages" / package / "benchmarks" / "results").glob("*.json"))
    rows = [row for path in files for row in json.loads(path.read_text())]
    return [row for row in rows if re.sub(r"\W", "_", row["op"].lower()).startswith(names)]


def _summary(value: Any) -> str:
    return (inspect.getdoc(value) or "").split("\n\n")[0].replace("\n", " ")


@cache
def mixers() -> dict[str, type]:
    """Every registered mixer of all packages, by name."""
    from tokenmix_core.nn.registry import find_mixer, known_mixers

    for module in PACKAGES.values():
        for part in ("model", "recipes"):
            if importlib.util.find_spec(f"{module}.{part}"):
                importlib.import_module(f"{module}.{part}")
    return {name: find_mixer(name) for name in known_mixers()}


def _mixers() -> Iterator[tuple[str, str]]:
    for name, mixer in mixers().items():
        first, *rest = (inspect.getdoc(mixer) or "").split("\n\n")[0].split("; ")
        parts = [f"# {name}"]
        if " = " in first:
            parts += [element("\n".join(part.replace("\n", " ").rstrip(".") for part in (first, *rest)))]
        package = mixer.__module__.partition(".")[0]
        used = sorted({folder for folder in operation_folders().values() if _uses(mixer, folder)})
        about = [f"`mixers: [{name}]` in the configuration of a model; of the package `{package.replace('_', '-')}`."]
        if used:
            links = ", ".join(f"[{folder}](../operations/{folder}.md)" for folder in used)
            about.append(f"It calls {links}.")
        # the class is in the reference, which other pages lead to
        options = "    options:\n      members: []\n      skip_local_inventory: true"
        parts += [" ".join(about), f"::: {mixer.__module__}.{mixer.__qualname__}\n{options}"]
        parts += ["## State", _state_table({name: mixer})]
        yield name, "\n\n".join(parts) + "\n"


def _uses(mixer: type, folder: str) -> bool:
    """Whether the module of a mixer imports a function of an operation's folder."""
    source = importlib.import_module(mixer.__module__)
    return any(
        len(parts := str(getattr(value, "__module__", "")).split(".")) > 3 and parts[1] == "ops" and parts[2] == folder
        for value in vars(source).values()
        if callable(value) and not inspect.isclass(value)
    )


_CONTEXTS = (1024, 16384, 131072)


def _states() -> str:
    return _state_table(mixers()) + "\n\nOne layer of width 1,024 as its defaults make it, one sequence, in bfloat16."


def _state_table(chosen: dict[str, type]) -> str:
    lines = ["| mixer | parameters | " + " | ".join(f"{n:,} tokens, KiB" for n in _CONTEXTS) + " |"]
    lines.append("|---|---:|" + "---:|" * len(_CONTEXTS))
    for name, mixer in chosen.items():
        layer = _layer(name, mixer)
        cells = []
        for context in _CONTEXTS:
            bounds = layer.state_bounds(context, 1, _bfloat16())
            low, high = (f"{n / 1024:,.0f}" for n in (bounds.least, bounds.most))
            cells.append(low if low == high else f"{low} to {high}")
        parameters = sum(p.numel() for p in layer.parameters())
        lines.append(f"| [{name}]({{mixers}}{name}.md) | {parameters:,} | " + " | ".join(cells) + " |")
    there = "" if len(chosen) == 1 else "mixers/"
    return "\n".join(lines).replace("{mixers}", there)


def _layer(name: str, mixer: type) -> Any:
    """One layer with its defaults, on the meta device; of 16 heads where it has no default of them."""
    import torch

    from tokenmix_core.modeling import HybridConfig

    required = inspect.signature(mixer).parameters.get("num_heads")
    options = {"num_heads": 16} if required is not None and required.default is inspect.Parameter.empty else {}
    layers = {"mixers": [name], "mixer_options": {name: options}}
    with torch.device("meta"):
        config = HybridConfig(hidden_size=1024, num_hidden_layers=1, **layers)
        return mixer.from_config(config, 0, **options)  # type: ignore[attr-defined]


def _bfloat16() -> Any:
    import torch

    return torch.bfloat16


def _paper(site: Site, name: str, title: str) -> str:
    """The package's README, its recipes, and what has been seen of it."""
    uri = f"papers/{name}.md"
    recipes = importlib.import_module(f"tokenmix_{name}.recipes").RECIPES
    command = f"tokenmix-{name.replace('_', '-')}"
    lines = [f"`{command} train RECIPE` runs one, `{command} info RECIPE --fields` shows all that it says.", ""]
    lines += ["| recipe | what it trains |", "|---|---|"]
    lines += [f"| `{recipe}` | {make().description} |" for recipe, make in recipes.items()]
    seen = _deeper(_text(site, f"docs/{name}.md", uri))
    parts = [_text(site, f"packages/{name}/README.md", uri).rstrip(), f"## All recipes of {title}", "\n".join(lines)]
    return "\n\n".join([*parts, seen.rstrip()]) + "\n"


def _reference() -> Iterator[tuple[str, str]]:
    """A page for each package of public modules, and for each layer of core."""
    for name, module in PACKAGES.items():
        root = ROOT / "packages" / name / "src" / module
        layers = [path for path in sorted(root.iterdir()) if (path / "__init__.py").is_file()]
        own = [path for path in sorted(root.glob("*.py")) if path.name != "__init__.py"]
        yield module, _modules(module, root, own)
        for layer in layers:
            # what an operation is made of is on its page, and in its folder
            files = [path for path in sorted(layer.glob("*.py")) if path.name != "__init__.py"]
            if name == "core" and files:
                yield f"{module}.{layer.name}", _modules(f"{module}.{layer.name}", layer, files)


def _modules(title: str, package: Path, files: list[Path]) -> str:
    parts = [f"# {title}", ast.get_docstring(ast.parse((package / "__init__.py").read_text(encoding="utf-8"))) or ""]
    for path in files:
        if names := public_names(path):
            # what a module takes from others to hand on is shown where it is made
            options = f"    options:\n      show_root_heading: false\n      members: [{', '.join(names)}]"
            parts += [f"## {path.stem}", f"::: {title}.{path.stem}\n{options}"]
    return "\n\n".join(filter(None, parts)) + "\n"


def public_names(path: Path) -> list[str]:
    """The functions and classes of a module without a leading underscore."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    return [n.name for n in body if isinstance(n, ast.FunctionDef | ast.ClassDef) and not n.name.startswith("_")]


def undocumented() -> Iterator[str]:
    """Public functions and classes of the packages without a docstring, and modules with code and none."""
    for path in sorted(ROOT.glob("packages/*/src/**/*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        where = path.relative_to(ROOT).as_posix()
        if tree.body and not ast.get_docstring(tree):
            yield where
        for node in tree.body:
            named = isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
            if named and not ast.get_docstring(node):
                yield f"{where}: {node.name}"
