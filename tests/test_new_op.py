"""Test that the template of a new operation gives files that run, pass their test and are formatted."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run(*command, **options):
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, **options)


@pytest.fixture
def package(tmp_path):
    """Copy core's sources, to which a new operation is added."""
    core = ROOT / "packages/core"
    shutil.copytree(core / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "tests/ops").mkdir(parents=True)
    shutil.copy(core / "tests/conftest.py", tmp_path / "tests")
    return tmp_path


def create(package, name):
    return run(sys.executable, ROOT / "tools/new_op.py", name, "--package", package)


def test_a_new_operation_passes_its_test(package):
    # the first, one in between and the last in the order of imports
    for name in ("a_gate", "soft_gate", "z_gate"):
        created = create(package, name)
        assert created.returncode == 0, created.stderr
    for check in (["check"], ["format", "--check"]):
        found = run(Path(sys.executable).with_name("ruff"), *check, f"--config={ROOT / 'pyproject.toml'}", package)
        assert found.returncode == 0, found.stdout
    environment = {**os.environ, "PYTHONPATH": str(package / "src")}
    test = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/ops/test_soft_gate.py")
    found = run(*test, cwd=package, env=environment)
    assert found.returncode == 0, found.stdout
    assert " passed" in found.stdout


@pytest.mark.parametrize(("name", "words"), [("SoftGate", "snake_case"), ("ssd", "exists")])
def test_names_that_cannot_be_used_are_refused(package, name, words):
    refused = create(package, name)
    assert refused.returncode == 2
    assert words in refused.stderr
