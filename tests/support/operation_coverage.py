"""Find the operations and operators of a package that its tests describe."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from inspect import isfunction
from pathlib import Path
from types import ModuleType

from tokenmix_core.ops.explanation import OPERATIONS


def operations_of(package: ModuleType) -> set[str]:
    """Return the operations of `package`, a package's `ops`, by name: public functions, and those `explain` knows."""
    home = package.__name__
    public = {name for name in package.__all__ if isfunction(getattr(package, name))}
    known = {name for name, x in OPERATIONS.items() if x.function.__module__.startswith(f"{home}.")}
    return (public | known) - {"explain"}


def described(tests: Path) -> set[str]:
    """Return the names in the attributes `covers` of contracts in a folder of tests, read from the source."""
    found = set()
    for file in _files(tests, "test_*.py"):
        for statement in ast.walk(file):
            if isinstance(statement, ast.ClassDef) and "OpContract" in {ast.unparse(x) for x in statement.bases}:
                for line in statement.body:
                    if isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == "covers":
                        found |= {x.id for x in ast.walk(line.value) if isinstance(x, ast.Name)}
    return found


def unchecked(package: ModuleType, tests: Path) -> set[str]:
    """Return the names of torch custom ops of a package to which neither contracts nor tests apply `opcheck`."""
    ops, named = set(), set()
    for file in _files(Path(package.__path__[0]), "*.py"):
        for line in file.body:
            if isinstance(line, ast.Assign) and _makes_an_op(line.value):
                ops.add(ast.unparse(line.targets[0]))
            elif isinstance(line, ast.FunctionDef) and any(map(_makes_an_op, line.decorator_list)):
                ops.add(line.name)
    for file in _files(tests, "test_*.py"):
        for x in ast.walk(file):
            if (isinstance(x, ast.FunctionDef) and x.name == "operators") or _calls(x, "opcheck"):
                named |= {y.id if isinstance(y, ast.Name) else getattr(y, "attr", "") for y in ast.walk(x)}
    return ops - named


def _makes_an_op(x: ast.AST) -> bool:
    return _calls(x, "cached_op", "custom_op")


def _calls(x: ast.AST, *names: str) -> bool:
    """Tell whether x is a call of a function of one of these names."""
    return isinstance(x, ast.Call) and ast.unparse(x.func).split(".")[-1] in names


def _files(folder: Path, pattern: str) -> Iterator[ast.Module]:
    """Yield the syntax trees of a folder's files, except tests that need a GPU (`*_gpu.py`)."""
    for path in folder.rglob(pattern):
        if not path.stem.endswith("_gpu"):
            yield ast.parse(path.read_text(encoding="utf-8"))
