"""The site: everything public is documented and has a page, no link leads nowhere, equations are typeset whole."""

import importlib
import posixpath
import re
import shutil
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "docs" / "site"))
equations, pages = importlib.import_module("equations"), importlib.import_module("pages")


@pytest.fixture(scope="module")
def site():
    return pages.build()


def test_every_public_name_is_documented():
    assert list(pages.undocumented()) == []


def test_every_operation_mixer_and_paper_has_a_page(site):
    for package, module in pages.PACKAGES.items():
        if importlib.util.find_spec(f"{module}.ops") is None:
            continue
        for name, function in ((f.__name__, f) for _, f in pages._functions(package, None)):
            page = site.pages[f"operations/{function.__module__.split('.')[2]}.md"]
            assert f"::: {function.__module__}.{name}\n" in page
    for name, mixer in pages.mixers().items():
        page = site.pages[f"mixers/{name}.md"]
        assert f"::: {mixer.__module__}.{mixer.__qualname__}\n" in page
        assert "| parameters |" in page
    for name in pages.PACKAGES.keys() - {"core"}:
        recipes = importlib.import_module(f"tokenmix_{name}.recipes").RECIPES
        assert all(f"| `{recipe}` |" in site.pages[f"papers/{name}.md"] for recipe in recipes)
    listed = re.findall(r"[\w./]+\.md", str(site.nav))
    assert sorted(listed) == sorted(site.pages), "a page that nothing leads to"


def test_no_link_of_a_page_leads_nowhere(site):
    for uri, text in site.pages.items():
        prose = re.sub(r"(?ms)^(```|~~~~).*?^\1[ \t]*$", "", text)
        for target in re.findall(r"\]\(([^()\s]+)\)", prose):
            if re.match(r"[a-z]+:", target):
                continue
            path = posixpath.normpath(posixpath.join(posixpath.dirname(uri), target.partition("#")[0]))
            assert target.startswith("#") or path in site.pages or path in site.files, f"{uri}: {target}"
    assert all(path.is_file() for path in site.files.values())


def test_what_the_arena_has_not_measured_is_said(site):
    reports = [path.read_text() for path in ROOT.glob("arena/results/*/report.md")]
    measured = any("**Smoke run.**" not in text and "![" in text for text in reports)
    assert measured != ("**Not measured**" in site.pages["choose.md"])


@pytest.mark.parametrize(
    ("plain", "tex"),
    [
        ("S_t = e^{g_t} S_{t−1} + k_t v_tᵀ", "S_{t} = e^{g_{t}} S_{t - 1} + k_{t} v_{t}^{\\top}"),
        ("u'_tᵀ", "u_{t}^{\\prime \\top}"),
        ("Ã = (I + L̃)⁻¹", "\\tilde{A} = ( I + \\tilde{L} )^{- 1}"),
        ("lse_i = log Σ_{j ∈ S(i)} exp(s_ij)", "\\operatorname{lse}_{i} = \\operatorname{log} \\sum_{j \\in S ( i )} "),
        ("dk_j for j < i", "dk_{j} \\;\\text{for}\\; j < i"),
        ("S(i) = { j }", "S ( i ) = \\{ j \\}"),
        ("(later chunks on the left)", "\\;\\text{later chunks on the left}\\;"),
        ("φ′(x) ⊕ y", "φ^{\\prime} ( x ) \\;\\text{⊕}\\; y"),
        ("S₀ S^K_s", "S_{0} S_{s}^{K}"),
    ],
)
def test_an_equation_is_set_as_it_reads(plain, tex):
    assert tex in re.sub(" +", " ", equations.tex(plain))


def test_equations_of_all_readmes_are_whole(site):
    found = [tex for text in site.pages.values() for tex in re.findall(r'data-tex="([^"]*)"', text)]
    assert len(found) > 40
    for tex in found:
        assert tex.count("{") == tex.count("}"), tex
        # KaTeX knows Greek letters, and what stands as text
        assert not re.search(r"[^\x00-\x7f\u0370-\u03ff]", re.sub(r"\\text\{[^}]*\}", "", tex)), tex
        # a mark above a word, not a letter, belongs to nothing
        assert not any(map(unicodedata.combining, tex)), tex


def test_code_is_no_equation():
    text = "before\n\n```python\n\n    x = 1\n```\n\n    y = 2\n\nafter\n"
    marked = equations.with_equations(text)
    assert marked.count('class="equation"') == 1
    assert "```python\n\n    x = 1\n```" in marked


def test_every_table_is_what_the_committed_numbers_and_models_give():
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

    def check() -> subprocess.CompletedProcess:
        command = [sys.executable, str(tmp_path / "tools" / "tables.py"), "--check"]
        return subprocess.run(command, capture_output=True, text=True)

    done = check()
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr
    for name, cell, other in (("oryx", "| 4 | .715 /", "| 4 | .725 /"), ("nha", "| .684 |", "| .685 |")):
        path = tmp_path / "docs" / f"{name}.md"
        assert cell in path.read_text()
        path.write_text(path.read_text().replace(cell, other))
    done = check()
    assert done.returncode == 1
    assert done.stdout.splitlines() == ["docs/oryx.md, recall by chunks: stale", "docs/nha.md, search: stale"]
