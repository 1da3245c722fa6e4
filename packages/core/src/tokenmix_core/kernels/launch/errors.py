"""The error that is raised if the installed Triton does not compile a Gluon kernel, distinct from all other errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tokenmix_core.kernels.launch import compat


class NotCompiled(RuntimeError):
    """The installed Triton does not compile a Gluon kernel, or the kernel exceeds the device's resources.

    Attributes:
        module: the name of the kernel's module.
    """

    def __init__(self, message: str, module: str) -> None:
        super().__init__(message)
        self.module = module


@contextmanager
def compiling(kernel: Any) -> Iterator[None]:
    """Raise compiler errors of a Gluon kernel as `NotCompiled`; all other errors pass unchanged.

    Gluon is experimental and differs between versions of Triton, so callers fall back to portable kernels. Exhausted
    memory and device errors cause no fallback.
    """
    try:
        yield
    except Exception as error:
        if not (kernel.is_gluon() and _from_compiler(error)):
            raise
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        # a compiler's message begins with the source line and ends with the error
        message = f"{kernel.__name__} does not compile: {lines[-1] if lines else type(error).__name__}"
        raise NotCompiled(message, kernel.__module__) from error


def _from_compiler(error: Exception) -> bool:
    cls = compat.find("triton.errors:TritonError")
    # also accept RuntimeError: a failing compiler pass raises it
    return (cls is not None and isinstance(error, cls)) or "PassManager::run failed" in str(error)
