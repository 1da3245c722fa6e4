"""Optional libraries: asked for inside the function that needs them, and named when they are missing."""

from __future__ import annotations

import importlib
import importlib.util
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


def is_installed(module: str) -> bool:
    """Tell whether an optional library is there, found without importing it.

    A folder that only holds another distribution's modules does not count: FlashAttention-4 alone leaves `flash_attn`
    with nothing but its own `cute`.
    """
    spec = importlib.util.find_spec(module)
    return spec is not None and spec.origin is not None
