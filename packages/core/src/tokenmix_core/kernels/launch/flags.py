"""Environment variables that are 0 or 1, and the switch that turns the launch cache on and off."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

_VARIABLE = "TOKENMIX_RECORD"


def flag(variable: str, default: bool, off: str, on: str) -> bool:
    """Return whether an environment variable is 1, `default` if unset; raise a ValueError unless it is 0 or 1.

    `off` and `on` say in the error message what the values 0 and 1 do.
    """
    value = os.environ.get(variable, str(int(default)))
    if value not in ("0", "1"):
        raise ValueError(f"{variable} must be 0 ({off}) or 1 ({on}), got {value!r}")
    return value == "1"


def wanted() -> bool:
    """Return False if the environment variable `TOKENMIX_RECORD` is 0, which disables the launch cache, else True.

    Raises:
        ValueError: the variable is neither 0 nor 1.
    """
    return flag(_VARIABLE, True, "run every call", "replay cached calls")


# state of the launch cache's switch; every call reads it
on = wanted()


@contextmanager
def caching(enabled: bool) -> Iterator[None]:
    """Enable or disable the launch cache inside the block; results are equal with and without it.

    The switch holds for the whole process and all its threads, backward passes included. Without the cache a call has
    tens to hundreds of microseconds more CPU overhead. The environment variable `TOKENMIX_RECORD=0` disables the cache
    from the start. Calls cached before the block are cached after it.
    """
    global on
    before, on = on, enabled
    try:
        yield
    finally:
        on = before
