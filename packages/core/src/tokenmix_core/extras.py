"""Optional libraries: asked for inside the function that needs them, and named when they are missing."""

from __future__ import annotations

import importlib
from types import ModuleType


def require(module: str, extra: str) -> ModuleType:
    """Import an optional library.

    Raises:
        ImportError: it is not installed; the message holds the command that installs it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != module.split(".")[0]:
            raise
        raise ImportError(
            f"{module.split('.')[0]} is not installed; install it with: pip install 'tokenmix-core[{extra}]'"
        ) from error
