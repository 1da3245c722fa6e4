"""Change Triton's interpreter: fast enough for tests, and with equal results on all processors."""

from __future__ import annotations

import functools
import importlib.util
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np


def hurry(interpreter: ModuleType | None = None) -> None:
    """Make the interpreter replace Triton's language functions once per launch, not at each call of a device function.

    Without this, each call goes through all names of the language and finds that they are already replaced, which takes
    a third to a half of a kernel's time. Does nothing if Triton is not installed or its interpreter has another
    structure.

    Args:
        interpreter: Triton's interpreter module; tests pass a substitute.
    """
    if interpreter is None and (interpreter := _interpreter()) is None:
        return
    replace = getattr(interpreter, "_patch_lang", None)
    if replace is None or hasattr(replace, "__wrapped__"):
        return
    replaced: set[str] = set()

    @functools.wraps(replace)
    def once(fn: Callable) -> Any:
        seen = _languages(fn)
        if seen and seen <= replaced:
            return _Nothing()
        scope = replace(fn)
        # remember the replaced modules, but only if `restore` tells when the originals are back
        if hasattr(scope, "restore"):
            replaced.update(seen)
            scope.restore = _then(scope.restore, replaced.clear)
        return scope

    interpreter._patch_lang = once  # type: ignore[attr-defined]


def steady(interpreter: ModuleType | None = None) -> None:
    """Make the interpreter compute matmuls in float64 and round them: a row's result then does not depend on its index.

    On some processors, numpy sums the last rows of a float32 matmul in another order than the other rows.

    Args:
        interpreter: Triton's interpreter module; tests pass a substitute.
    """
    if interpreter is None and (interpreter := _interpreter()) is None:
        return
    builder = getattr(interpreter, "InterpreterBuilder", None)
    multiply = getattr(builder, "create_dot", None)
    if multiply is None or hasattr(multiply, "__wrapped__"):
        return

    @functools.wraps(multiply)
    def create_dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        if any(x.data.dtype.kind != "f" for x in (a, b)):
            return multiply(self, a, b, d, *options)
        result = np.matmul(a.data, b.data, dtype=np.float64).astype(d.data.dtype)
        return type(d)(result + d.data, d.dtype.scalar)

    builder.create_dot = create_dot  # type: ignore[union-attr]


def _interpreter() -> ModuleType | None:
    if importlib.util.find_spec("triton") is None:
        return None
    from triton.runtime import interpreter

    return interpreter


@functools.cache
def _languages(fn: Callable) -> frozenset[str]:
    """Return the names of the Triton modules to which a function's globals refer."""
    modules = (x.__name__ for x in fn.__globals__.values() if inspect.ismodule(x))
    return frozenset(name for name in modules if name.startswith("triton."))


class _Nothing:
    """A patch that has replaced nothing; its `restore` does nothing."""

    def restore(self) -> None: ...


def _then(first: Callable[[], None], second: Callable[[], None]) -> Callable[[], None]:
    def both() -> None:
        first()
        second()

    return both
