"""Test the site: everything public is documented and has a page, every link has a target, equations are valid."""

import ast
import importlib
import posixpath
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "docs" / "site"), str(ROOT / "tools")]
FENCE = re.compile(r"(?ms)^(```|~~~~).*?^\1[ \t]*$")
MATHS = re.compile(r"(?ms)^\$\$\n(.*?)^\$\$$")
PAGES = sorted(
    path
    for path in subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True).stdout.split()
    if not path.endswith("CHANGELOG.md") and (ROOT / path).is_file()
)


@pytest.fixture(scope="module")
def hooks():
    pytest.importorskip("mkdocs")
    return importlib.import_module("hooks")


def test_every_public_name_is_documented():
    missing = []
    for path in sorted(ROOT.glob("packages/*/src/**/*.py")):
        tree, where = ast.parse(path.read_text(encoding="utf-8")), path.relative_to(ROOT).as_posix()
        if tree.body and not ast.get_docstring(tree):
            missing.append(where)
        for node in tree.body:
            named = isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
            if named and not ast.get_docstring(node):
                missing.append(f"{where}: {node.name}")
    assert missing == []


def test_every_operation_mixer_and_recipe_is_on_a_page(hooks):
    pages = {uri for _, uri in hooks.operations()}
    assert len(pages) > 10
    documented = hooks.public_functions()
    assert set(documented) <= pages | {"operations.md"}
    assert sum(map(len, documented.values())) > 30
    mixers, recipes = hooks.mixers_page(), hooks.recipes_page()
    for name, mixer in importlib.import_module("states").mixers().items():
        assert f"## {name}\n" in mixers
        assert f"::: {mixer.__module__}.{mixer.__qualname__}\n" in mixers
    for name in hooks.PACKAGES.keys() - {"core"}:
        assert all(f"| `{x}` |" in recipes for x in importlib.import_module(f"tokenmix_{name}.recipes").RECIPES)


def test_every_page_is_in_the_navigation(hooks):
    text = (ROOT / "docs" / "site" / "mkdocs.yml").read_text(encoding="utf-8")
    listed = set(re.findall(r"(?m): ([\w./-]+\.md)$", text))
    generated = {uri for _, uri in hooks.operations()} | {f"docs/{uri}" for _, uri in hooks.log()}
    generated |= {uri for _, uri, _ in hooks.reference()}
    assert set(PAGES) - listed - generated == set()
    assert all(path in PAGES or path in ("mixers.md", "recipes.md") for path in listed)


def test_page_of_integrations_lists_each_family_that_is_not_covered():
    from tokenmix_core.integrations.transformers import UNCOVERED

    section = (ROOT / "docs/integrations.md").read_text(encoding="utf-8").split("## Families that are not covered")[1]
    rows = re.findall(r"(?m)^\| ([a-z][\w, ]+) \|", section)
    assert sorted(", ".join(rows[1:]).split(", ")) == sorted(UNCOVERED)


def test_no_link_of_a_page_leads_nowhere():
    for page in PAGES:
        prose = FENCE.sub("", (ROOT / page).read_text(encoding="utf-8"))
        for target in re.findall(r"\]\(([^()\s]+)\)", prose):
            if not re.match(r"[a-z]+:|#", target):
                path = posixpath.normpath(posixpath.join(posixpath.dirname(page), target.partition("#")[0]))
                assert (ROOT / path).is_file(), f"{page}: {target}"


def test_equations_are_written_so_that_github_and_katex_read_them_alike():
    found = [(page, maths) for page in PAGES for maths in MATHS.findall((ROOT / page).read_text(encoding="utf-8"))]
    assert len(found) > 40
    for page, maths in found:
        plain = re.sub(r"\\text\{[^{}]*\}", "", maths)
        assert maths.count("{") == maths.count("}"), f"{page}: {maths}"
        assert re.findall(r"\\begin\{(\w+)\}", maths) == re.findall(r"\\end\{(\w+)\}", maths)[::-1], f"{page}: {maths}"
        assert plain.isascii(), f"{page}: {maths}"
        # GitHub's Markdown reads a backslash before punctuation as an escape
        assert not re.search(r"(?<!\\)\\[^A-Za-z\\\s]", plain), f"{page}: {maths}"


def test_every_table_follows_from_the_committed_measurements_and_models():
    done = subprocess.run([sys.executable, ROOT / "tools" / "tables.py", "--check"], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr.count("left as they are")) == (0, "", 0), (
        done.stdout + done.stderr
    )


def test_generated_cells_equal_committed_measurements(tmp_path):
    shutil.copytree(ROOT / "docs", tmp_path / "docs", ignore=shutil.ignore_patterns("plots", "__pycache__"))
    shutil.copytree(ROOT / "tools", tmp_path / "tools", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "README.md", tmp_path)
    for package in (ROOT / "packages").iterdir():
        if (package / "benchmarks").is_dir():
            shutil.copytree(package / "benchmarks", tmp_path / "packages" / package.name / "benchmarks")
            shutil.copy(package / "README.md", tmp_path / "packages" / package.name)

    for name, cell, other in (("oryx", "| 4 | .715 /", "| 4 | .725 /"), ("nha", "| .684 |", "| .685 |")):
        path = tmp_path / "docs" / f"{name}.md"
        assert cell in path.read_text()
        path.write_text(path.read_text().replace(cell, other))
    # tables that are counted from models are checked above
    command = [sys.executable, str(tmp_path / "tools" / "tables.py"), "--check", "--without-models"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert done.stdout.splitlines() == ["docs/oryx.md, recall by chunks: stale", "docs/nha.md, search: stale"]
