"""Kernels in Gluon that a version of Triton does not compile, told apart from everything else that may go wrong."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tokenmix_core.kernels.launch import compat


class NotCompiled(RuntimeError):
    """A kernel in Gluon that this version of Triton does not compile, or compiles to more than a device has room for.

    Attributes:
        module: the name of the module that the kernel is defined in.
    """

    def __init__(self, message: str, module: str) -> None:
        super().__init__(message)
        self.module = module


@contextmanager
def compiling(kernel: Any) -> Iterator[None]:
    """Raise what Triton's compiler says of a kernel in Gluon as `NotCompiled`; other errors, and other kernels', pass.

    Gluon is experimental, and versions of Triton differ in it: callers have portable kernels to take instead. Neither
    memory that has run out nor an error of the device is a reason to do so.
    """
    try:
        yield
    except Exception as error:
        if not (kernel.is_gluon() and compat.is_of_compiler(error)):
            raise
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        # a compiler's message begins with the source it points at and ends with what is wrong
        message = f"{kernel.__name__} does not compile: {lines[-1] if lines else type(error).__name__}"
        raise NotCompiled(message, kernel.__module__) from error
