"""Tell whether calls are recorded: the switch that users have."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

_VARIABLE = "TOKENMIX_RECORD"


def flag(variable: str, default: bool, off: str, on: str) -> bool:
    """The value of an environment variable; a ValueError for what is neither 0 nor 1, with what these mean."""
    value = os.environ.get(variable, str(int(default)))
    if value not in ("0", "1"):
        raise ValueError(f"{variable} must be 0 ({off}) or 1 ({on}), got {value!r}")
    return value == "1"


def wanted() -> bool:
    """Tell whether the environment leaves recording on; a ValueError for what is neither 0 nor 1."""
    return flag(_VARIABLE, True, "run every call", "replay recorded calls")


# read with every call
on = wanted()


@contextmanager
def recording(enabled: bool) -> Iterator[None]:
    """Record and replay calls inside the block, or run every one of them; results are the same.

    For the whole process, backward passes included, whichever thread they run in. Runs cost host time alone: some tens
    to hundreds of microseconds a call. The environment variable `TOKENMIX_RECORD=0` says so from the start. What was
    recorded before the block is there after it.
    """
    global on
    before, on = on, enabled
    try:
        yield
    finally:
        on = before
