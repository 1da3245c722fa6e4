"""Model types and mixers that are known once a package is imported, at no cost until one is asked for.

`import tokenmix_core` must not import transformers, and `AutoConfig` must know our models whichever is imported first.
So a package announces its model types with the modules that register them; transformers' table of configurations then
imports such a module when its model type is looked up; `nn.registry` does the same for mixers.
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

# the module of transformers that holds the table, and the table's public name
_AUTO, _TABLE = "transformers.models.auto.configuration_auto", "CONFIG_MAPPING"
_HOMES: dict[str, str] = {}
# by a mixer's name, the module whose import registers it
MIXERS: dict[str, str] = {}


def announce(homes: Mapping[str, str], mixers: Mapping[str, str] | None = None) -> None:
    """Let transformers find model types, and configurations mixers.

    Args:
        homes: by model type, the module whose import registers it.
        mixers: the same by a mixer's name.
    """
    _HOMES.update(homes)
    MIXERS.update(mixers or {})
    if _AUTO in sys.modules:
        _watch(sys.modules[_AUTO])
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder):
    """Waits for the import of transformers' module; finds it as others do."""

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
    """Make the table look up announced model types too."""
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
    # a module that is being imported asks for its own model type; one that failed is tried again
    home = _HOMES.pop(key, None) if isinstance(key, str) else None
    if home is not None:
        try:
            importlib.import_module(home)
        except BaseException:
            _HOMES[key] = home
            raise
