"""The names of the packages to which the running command belongs."""

from __future__ import annotations

from typing import Any


def packages_of(*registries: Any) -> list[str]:
    """Return the module names of core and of the packages in "module:attribute" strings."""
    own = [x.partition(":")[0].partition(".")[0] for x in registries if isinstance(x, str)]
    return list(dict.fromkeys(["tokenmix_core", *own]))
