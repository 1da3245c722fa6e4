"""The packages whose command runs."""

from __future__ import annotations

from typing import Any


def packages_of(*registries: Any) -> list[str]:
    """Return core and the packages of "module:attribute" names, by the names that modules have."""
    own = [x.partition(":")[0].partition(".")[0] for x in registries if isinstance(x, str)]
    return list(dict.fromkeys(["tokenmix_core", *own]))
