"""Launch kernels: compile them in parallel, launch them with little CPU overhead, and cache launches by signature."""

from __future__ import annotations

import warnings
from typing import Any

from tokenmix_core.kernels.launch.flags import caching

__all__ = ["caching"]


def __getattr__(name: str) -> Any:
    if name == "recording":
        warnings.warn("kernels.launch.recording is now called caching", FutureWarning, stacklevel=2)
        return caching
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
