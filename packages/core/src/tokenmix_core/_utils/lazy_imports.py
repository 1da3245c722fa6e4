"""Public names of a package that are imported when they are first asked for."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def lazily(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` of a package whose import is quick, though its names need torch.

    Args:
        package: the package's `__name__`.
        homes: by name, the module of the package that has it; `module:other` if it has another name there, `module:`
            for the module itself. No module may have the name of an export: imported, it would replace it.
    """

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, renamed, other = homes[name].partition(":")
        found = importlib.import_module(f"{package}.{module}")
        return found if renamed and not other else getattr(found, other or name)

    return find
