"""Modules of tables that tell of their changes, so that nobody goes on by what was decided with the old ones."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

_listening: list[Callable[[], None]] = []


def on_change(tell: Callable[[], None]) -> None:
    """Call `tell()` after every change of a module that `watch` was called for, and of the tables in it."""
    _listening.append(tell)


def watch(name: str) -> None:
    """Let the module of this name tell when one of its attributes, or of the dicts in them, is changed from now on."""
    module = sys.modules[name]
    tables: dict[int, Table] = {}
    for key, x in vars(module).items():
        if not key.startswith("__"):
            vars(module)[key] = _telling_of(x, tables)
    module.__class__ = _Watched


class _Watched(ModuleType):
    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, _telling_of(value, {}))
        _changed()

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        _changed()


def _changed() -> None:
    for tell in _listening:
        tell()


def _change(name: str) -> Callable:
    method = getattr(dict, name)

    @functools.wraps(method)
    def change(self: dict, *args: Any, **values: Any) -> Any:
        try:
            return method(self, *args, **values)
        finally:
            _changed()

    return change


class Table(dict):
    """A dict that tells of its changes."""

    __setitem__ = _change("__setitem__")
    __delitem__ = _change("__delitem__")
    __ior__ = _change("__ior__")
    clear = _change("clear")
    pop = _change("pop")
    popitem = _change("popitem")
    setdefault = _change("setdefault")
    update = _change("update")


def _telling_of(x: Any, tables: dict[int, Table]) -> Any:
    """x, as a table where it is a dict, and so are those in it; `tables` are those made so far, by what they were."""
    if type(x) is not dict:
        return x
    if id(x) not in tables:
        tables[id(x)] = Table({key: _telling_of(value, tables) for key, value in x.items()})
    return tables[id(x)]
