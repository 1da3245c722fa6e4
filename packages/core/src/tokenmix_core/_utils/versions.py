"""Versions of the software that produced a result."""

from __future__ import annotations

import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_LIBRARIES = ("torch", "triton", "transformers", "numpy")


def software() -> dict[str, Any]:
    """Return the versions of Python, of imported tokenmix packages and of `_LIBRARIES`, and the git commit."""
    ours = sorted(name for name in sys.modules if name.startswith("tokenmix_") and "." not in name)
    versions = {name.replace("_", "-"): version_of(name) for name in (*ours, *_LIBRARIES)}
    known = {name: found for name, found in versions.items() if found is not None}
    return {"python": platform.python_version(), "versions": known, "commit": commit_of(Path(__file__))}


def version_of(distribution: str) -> str | None:
    """Return the version of a module or installed distribution; None if there is none."""
    if (found := getattr(sys.modules.get(distribution.replace("-", "_")), "__version__", None)) is not None:
        return str(found)
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def commit_of(file: Path) -> str | None:
    """Return the commit of the checkout that tracks `file`, with ", changed" if it has changes; None without one."""
    git = ["git", "-C", str(file.parent)]

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*git, *arguments], capture_output=True, text=True, check=False)

    try:
        # an installed file may lie inside another project's checkout, which does not track it
        if run("ls-files", "--error-unmatch", file.name).returncode:
            return None
        commit = run("rev-parse", "--short", "HEAD").stdout.strip()
        changed = run("status", "--porcelain", "--untracked-files=no").stdout.strip()
    except OSError:
        # git is not installed
        return None
    return f"{commit}, changed" if commit and changed else commit or None
