"""A pytest plugin that checks calls against the shapes and dtypes of annotations.

`PYTHONPATH=tests pytest -p support.annotations` loads it. It needs a run of its own, in eager mode, because
torch.compile cannot trace the checks, and Triton cannot compile functions that contain them.
"""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

from jaxtyping import install_import_hook

_PACKAGES = ("tokenmix_core", "tokenmix_lte", "tokenmix_nats_l", "tokenmix_nha", "tokenmix_oryx")
# folders of core whose functions are checked; below `ops` only those in files that `_OF_OPERATIONS` matches, which hold
# public functions and references and run in eager mode
_FOLDERS = ("modeling", "nn", "ops")
_OF_OPERATIONS = re.compile(r"/(api|reference)\.py|ops/fused/(?!\w+_kernels?\.py)\w+\.py")
# a module is not checked if this matches its source: if it defines kernels, operators (torch reads their schema from
# annotations) or configurations (transformers makes their constructors)
_LEFT_OUT = re.compile(r"(triton|gluon)\.jit|(custom|triton)_op\(|library\.define|^class \w*Config\(", re.MULTILINE)


def checked_modules() -> list[str]:
    """Return the modules whose functions are checked: modules of installed packages that run only in eager mode."""
    found = []
    for package in _PACKAGES:
        spec = find_spec(package)
        for root in [] if spec is None else spec.submodule_search_locations or []:
            # search files instead of importing modules: a module imported before the hook would not be checked
            for path in sorted(Path(root).rglob("*.py")):
                first, *_ = inside = path.relative_to(root).parts
                if package == "tokenmix_core" and first not in _FOLDERS:
                    continue
                if path.name == "__init__.py" or (first == "ops" and not _OF_OPERATIONS.search(path.as_posix())):
                    continue
                if not _LEFT_OUT.search(path.read_text(encoding="utf-8")):
                    found.append(".".join((package, *inside)).removesuffix(".py"))
    return found


install_import_hook(checked_modules(), "beartype.beartype")
