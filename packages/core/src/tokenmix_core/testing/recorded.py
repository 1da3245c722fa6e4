"""Tests that change what chooses tiles: recorded calls must not outlive the change."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tokenmix_core.ops.replay import Replayed


def forgotten_with_changes(monkeypatch: Any) -> Iterator[None]:
    """A fixture's body: recorded calls are forgotten before a test and with every attribute that it changes."""
    change = monkeypatch.setattr

    def setattr_and_forget(*args: Any, **options: Any) -> None:
        change(*args, **options)
        Replayed.forget()

    Replayed.forget()
    monkeypatch.setattr = setattr_and_forget
    yield
    del monkeypatch.setattr
