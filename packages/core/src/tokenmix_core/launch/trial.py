"""Kernels and graphs that no GPU has run yet: whether they are chosen there by themselves."""

from __future__ import annotations

from tokenmix_core.launch import private
from tokenmix_core.launch.switch import flag


@private.constant_when_traced
def untried() -> bool:
    """Tell whether kernels and graphs that have run on no GPU yet are chosen on one like any others.

    They are right in Triton's interpreter and were compiled for Hopper; until they have been timed, they run where they
    are asked for by name, or everywhere with `TOKENMIX_UNTRIED=1`.
    """
    return flag("TOKENMIX_UNTRIED", False, "choose what was measured", "choose kernels that no GPU has run, too")
