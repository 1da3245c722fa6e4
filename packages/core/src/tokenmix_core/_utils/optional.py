"""Import optional libraries inside the functions that need them, or say which extra installs them."""

from __future__ import annotations

import importlib
import importlib.util
import json
import tomllib
import urllib.parse
import urllib.request
from contextvars import ContextVar
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from types import ModuleType

CORE = "tokenmix-core"
# the distribution whose command line is running; users install its extras, which have the names of core's extras
PACKAGE = ContextVar("package", default=CORE)


def install_command(requirement: str) -> str:
    """Return the command that installs `requirement`, such as "tokenmix-core[eval]", into the running environment.

    An extra of core is replaced by the same extra of the distribution `PACKAGE`. The command is `uv sync` for an extra
    of ours in a clone of the workspace; otherwise `uv pip` if uv has installed core, else pip.
    """
    name, _, extras = requirement.rstrip("]").partition("[")
    if name.startswith("tokenmix-") and _in_workspace():
        return f"uv sync --all-packages {' '.join(f'--extra {extra}' for extra in extras.split(','))}"
    if name == CORE:
        requirement = f"{PACKAGE.get()}[{extras}]"
    return f"{'uv ' if _about_core('INSTALLER').strip() == 'uv' else ''}pip install '{requirement}'"


def _about_core(file: str) -> str:
    """Return the text of a file of core's installed metadata; empty if there is no such file."""
    try:
        return distribution(CORE).read_text(file) or ""
    except PackageNotFoundError:
        return ""


def _in_workspace() -> bool:
    """True if core is installed as an editable package of a uv workspace."""
    origin = json.loads(_about_core("direct_url.json") or "{}")
    if not origin.get("dir_info", {}).get("editable"):
        return False
    path = Path(urllib.request.url2pathname(urllib.parse.urlsplit(origin["url"]).path))
    root = path.parent.parent / "pyproject.toml"
    return root.is_file() and "workspace" in tomllib.loads(root.read_text()).get("tool", {}).get("uv", {})


def require(module: str, extra: str, package: str = CORE) -> ModuleType:
    """Import and return an optional library that an extra of `package` installs.

    Raises:
        ImportError: the library is not installed; the message has the command that installs it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != module.split(".")[0]:
            raise
        raise ImportError(
            f"{module.split('.')[0]} is not installed; install it with: {install_command(f'{package}[{extra}]')}"
        ) from error


def is_installed(module: str) -> bool:
    """True if an optional library is installed; does not import it.

    A folder that only contains another distribution's modules does not count: FlashAttention-4, for example, creates a
    folder `flash_attn` with only the module `cute`.
    """
    spec = importlib.util.find_spec(module)
    return spec is not None and spec.origin is not None
