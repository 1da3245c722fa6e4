"""Import the public names of a package when they are first accessed."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable
from typing import Any


def lazily(package: str) -> Callable[[str], Any]:
    """Return a `__getattr__` for a package that imports the names of its `if TYPE_CHECKING:` block at first access.

    The block, at the top level of the package's `__init__`, consists of statements `from MODULE import NAME`. No module
    of the package may have the name of an export: importing the module would replace the export.

    Args:
        package: the package's `__name__`.
    """
    homes = {}
    source = sys.modules[package].__spec__.loader.get_source(package)  # type: ignore[union-attr]
    for block in ast.parse(source).body:
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING":
            for line in block.body:
                assert isinstance(line, ast.ImportFrom), ast.unparse(line)
                homes |= {x.asname or x.name: (line.module, x.name) for x in line.names}

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, attribute = homes[name]
        home = importlib.import_module(module)
        return (
            getattr(home, attribute) if hasattr(home, attribute) else importlib.import_module(f"{module}.{attribute}")
        )

    return find
