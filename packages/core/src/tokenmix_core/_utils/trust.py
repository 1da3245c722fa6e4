"""Load models by transformers' auto classes without running Python code that comes with a model.

transformers asks on standard input whether to run such code, so that input from a pipe could answer yes. These
functions never ask: the code runs only inside the context `trusting(True)`, which commands enter with
`--trust-remote-code`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

_trusted: ContextVar[bool] = ContextVar("trusted", default=False)


def is_trusted() -> bool:
    """True if Python code that comes with a model may run in the current context."""
    return _trusted.get()


@contextmanager
def trusting(trusted: bool) -> Iterator[None]:
    """Context manager: Python code that comes with a model may run (True) or must not run (False) inside."""
    before = _trusted.set(trusted)
    try:
        yield
    finally:
        _trusted.reset(before)


def from_pretrained(auto_class: Any, source: Any, **options: Any) -> Any:
    """Call `auto_class.from_pretrained(source, **options)`.

    Raises:
        ValueError: the folder or repository contains Python code that is not trusted.
    """
    with _refusing(source):
        return auto_class.from_pretrained(source, trust_remote_code=is_trusted(), **options)


def from_config(auto_class: Any, config: Any, **options: Any) -> Any:
    """Call `auto_class.from_config(config, **options)`.

    Raises:
        ValueError: the configuration names Python code that is not trusted.
    """
    with _refusing(config.name_or_path or type(config).__name__):
        return auto_class.from_config(config, trust_remote_code=is_trusted(), **options)


@contextmanager
def _refusing(source: Any) -> Iterator[None]:
    """Context manager: replace transformers' error for untrusted code by a ValueError that names our option."""
    try:
        yield
    except ValueError as error:
        if "trust_remote_code=True" not in str(error):
            raise
        raise ValueError(
            f"{source} needs its own Python code, which is not run; read that code, and if you trust it, "
            "give --trust-remote-code (in Python: `with tokenmix_core._utils.trust.trusting(True):`)"
        ) from error
