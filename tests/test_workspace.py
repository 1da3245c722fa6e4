"""Test the workspace's own tools: a lock is compared by its pins, and every extra installs from wheels."""

import ast
import importlib
import importlib.util
import itertools
import pkgutil
import re
import subprocess
import sys
import tomllib
import types
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ANYWHERE = "sys_platform == 'darwin' or sys_platform == 'linux'"


@pytest.fixture(scope="module")
def noxfile():
    spec = importlib.util.spec_from_file_location("workspace_noxfile", ROOT / "noxfile.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def export(name="numpy==2.4.6", marker=ANYWHERE, hashes="12"):
    lines = [f"{name} ; {marker}" if marker else name, *(f"    --hash=sha256:{h}" for h in hashes)]
    return "\\\n".join(lines) + "\n"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        # as two versions of uv print one marker
        (
            "(python_full_version < '3.12' and sys_platform == 'darwin') or "
            "(python_full_version < '3.12' and sys_platform == 'linux')",
            "python_full_version < '3.12' and (sys_platform == 'darwin' or sys_platform == 'linux')",
        ),
        ("python_version >= '3.12'", "python_full_version >= '3.12'"),
        ("python_version > '3.11'", "python_full_version >= '3.12'"),
        ("sys_platform == 'linux' or sys_platform != 'linux'", ""),
        ("platform_machine in 'aarch64 arm64'", "platform_machine in 'aarch64 arm64'"),
    ],
)
def test_a_lock_that_is_only_written_otherwise_pins_the_same(noxfile, one, other):
    assert noxfile.pin_differences(export(marker=one), export(marker=other)) == []
    committed = export("a==1", one) + export("b==2", one)
    reordered = "# by another uv\n" + export("B==2", other, "21") + export("a==1", other)
    assert noxfile.pin_differences(committed, reordered) == []


@pytest.mark.parametrize(
    ("fresh", "said"),
    [
        (export("numpy==2.4.7"), ["- numpy==2.4.6", "+ numpy==2.4.7"]),
        (export() + export("more==1"), ["+ more==1"]),
        ("", ["- numpy==2.4.6"]),
        (export(hashes="13"), ["! numpy==2.4.6: other hashes"]),
        (export(hashes="123"), ["! numpy==2.4.6: other hashes"]),
        (export(marker=""), [f"! numpy==2.4.6: {ANYWHERE}, now everywhere".replace("'", '"')]),
    ],
)
def test_whatever_else_is_pinned_is_named(noxfile, fresh, said):
    assert noxfile.pin_differences(export(), fresh) == said


def test_no_two_of_these_markers_hold_in_the_same_environments(noxfile):
    markers = [
        "",
        *(f"python_version {sign} '3.12'" for sign in ("<", "<=", ">", ">=", "==", "!=")),
        "python_full_version < '3.12.4'",
        "python_version < '3.12' and sys_platform == 'linux'",
        "python_version < '3.12' or sys_platform == 'linux'",
        *(f"sys_platform {sign} 'linux'" for sign in ("==", "!=")),
        "platform_machine == 'x86_64'",
    ]
    for one, other in itertools.combinations(markers, 2):
        assert noxfile.pin_differences(export(marker=one), export(marker=other)), (one, other)


def test_the_committed_lock_is_read_whole(noxfile):
    text = (ROOT / "requirements.lock").read_text()
    pins = noxfile.pins(text)
    assert sum(len(pin.hashes) for pin in pins.values()) == text.count("--hash=")
    assert {name.partition("==")[0] for name in pins} >= {"torch", "triton", "transformers", "numpy"}
    assert noxfile.pin_differences(text, text) == []


@pytest.mark.parametrize("url", ["https://github.com/owner/name", None])
def test_an_index_can_follow_every_link_of_a_wheel(noxfile, url, tmp_path, monkeypatch):
    """The built METADATA holds absolute links to files that exist, or plain text if the repository is unknown."""
    monkeypatch.setattr(noxfile, "address", lambda session: url)
    session = types.SimpleNamespace(
        create_tmp=lambda: tmp_path,
        run_install=lambda *command, external: subprocess.run(command, check=True),
        warn=lambda text: None,
        error=pytest.fail,
    )
    noxfile.build(session, "--package=tokenmix-nha", tmp_path / "dist")
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    links = re.findall(r"\]\(([^)\s]+)\)", noxfile.metadata(wheel))
    inside = [x.partition("#")[0].removeprefix(f"{url}/blob/HEAD/") for x in links if url and x.startswith(url)]
    assert all((ROOT / x).is_file() for x in inside)
    assert bool(inside) == bool(url)
    assert all(x.startswith(("https://", "#")) for x in links)


@pytest.mark.parametrize("package", sorted(p.parent.name for p in ROOT.glob("packages/*/pyproject.toml")))
def test_no_readme_has_a_relative_link_that_the_wheel_keeps(noxfile, package):
    text = (ROOT / "packages" / package / "README.md").read_text()
    for url in ("https://example.org/x", None):
        assert not noxfile.RELATIVE.search(noxfile.published(text, package, url))
    image = "![a plot](figures/a.png) [of](#b) [c](../../docs/c.md#d)"
    expected = "![a plot](U:/raw/HEAD/packages/nha/figures/a.png) [of](#b) [c](U:/blob/HEAD/docs/c.md#d)"
    assert noxfile.published(image, "nha", "U:") == expected


def test_papers_have_all_extras_of_core(noxfile):
    """A missing library is named as an extra of the package whose command runs."""
    for package in set(noxfile.PACKAGES) - {"core"}:
        extras = noxfile.distribution(package)["optional-dependencies"]
        assert extras == {x: [f"tokenmix-core[{x}]"] for x in noxfile.distribution("core")["optional-dependencies"]}


def test_every_extra_can_be_installed_without_a_compiler(noxfile):
    # these are built from source only, by setups that ask for torch before it is there
    built = {"flash-attn", "causal-conv1d", "mamba-ssm"}
    assert not built & {name.partition("==")[0] for name in noxfile.pins((ROOT / "requirements.lock").read_text())}


def test_plain_uv_sync_installs_all_packages_and_the_test_tools():
    """The pages set up a clone by `uv sync` or a first `uv run`, and then use every package's command and pytest."""
    root = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = {tomllib.loads(p.read_text())["project"]["name"] for p in ROOT.glob("packages/*/pyproject.toml")}
    assert packages == {requirement.partition("[")[0] for requirement in root["project"]["dependencies"]}
    assert {"dev", "test"} <= set(root["tool"]["uv"]["default-groups"])


@pytest.mark.parametrize("name", sorted(path.parent.name for path in ROOT.glob("packages/*/pyproject.toml")))
def test_every_module_is_found_under_its_own_name(name):
    """A function of a module's name would shadow it in the package, and `import a.b.c as c` would fail."""
    package = importlib.import_module(f"tokenmix_{name}")
    hidden = []
    for found in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if found.name.startswith("tokenmix_core.integrations.vllm.") and importlib.util.find_spec("vllm") is None:
            continue
        module = importlib.import_module(found.name)
        parent, _, last = found.name.rpartition(".")
        if getattr(sys.modules[parent], last) is not module:
            hidden.append(found.name)
    assert hidden == []


def test_only_one_module_calls_the_auto_classes():
    """Everywhere else `tokenmix_core._utils.trust` loads, which never runs a folder's code unasked."""
    calls = []
    for path in sorted(ROOT.glob("packages/*/src/**/*.py")):
        if "testing" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr in ("from_pretrained", "from_config"):
                owner = node.value.id if isinstance(node.value, ast.Name) else ""
                if owner.startswith("Auto") or owner == "auto_class":
                    calls.append(path.name)
    assert calls == ["trust.py", "trust.py"]
