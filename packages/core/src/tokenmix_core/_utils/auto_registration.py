"""Register model types and mixers whose modules are imported only when one of them is looked up.

`import tokenmix_core` must not import transformers, yet `AutoConfig` must know our models, whichever of the two is
imported first. A package therefore announces the names of its model types, and for each name the module that registers
the model. This module changes transformers' table of configurations, so that looking up an announced name first imports
the registering module. `nn.registry` does the same for mixers.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import sys
from collections.abc import Mapping
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

# transformers' module with the table of configurations; the table's name in this module
_AUTO, _TABLE = "transformers.models.auto.configuration_auto", "CONFIG_MAPPING"
_HOMES: dict[str, str] = {}
# maps a mixer's name to the module whose import registers this mixer
MIXERS: dict[str, str] = {}


def announce(homes: Mapping[str, str], mixers: Mapping[str, str] | None = None) -> None:
    """Announce model types to transformers, and mixers to our configurations.

    Args:
        homes: maps each model type to the module whose import registers it.
        mixers: maps each mixer's name to the module whose import registers it.
    """
    _HOMES.update(homes)
    MIXERS.update(mixers or {})
    if _AUTO in sys.modules:
        _watch(sys.modules[_AUTO])
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder):
    """Import finder for transformers' module `_AUTO`: lets the other finders load it, then calls `_watch`."""

    def __init__(self) -> None:
        self.asking = False

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != _AUTO or self.asking:
            return None
        self.asking = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self.asking = False
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_watch(module: ModuleType) -> None:
            execute(module)
            _watch(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)

        spec.loader.exec_module = execute_and_watch  # type: ignore[method-assign]
        return spec


def _watch(module: ModuleType) -> None:
    """Change the table of configurations in transformers' module, so that it also looks up announced model types."""
    table = getattr(module, _TABLE, None)
    if table is None or hasattr(type(table), "announced"):
        return
    kind: Any = type(table)

    class Announced(kind):
        announced = _HOMES

        def __getitem__(self, key: str) -> Any:
            _load(key)
            return super().__getitem__(key)

        def __contains__(self, key: object) -> bool:
            _load(key)
            return super().__contains__(key)

    table.__class__ = Announced


def _load(key: Any) -> None:
    # pop the entry first, because the module may ask for its own type while it is imported; put it back if the import
    # fails
    home = _HOMES.pop(key, None) if isinstance(key, str) else None
    if home is not None:
        try:
            importlib.import_module(home)
        except BaseException:
            _HOMES[key] = home
            raise
