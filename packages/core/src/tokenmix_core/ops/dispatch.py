"""Select the implementation of a call: reference, portable Triton kernels, or Gluon kernels for Hopper.

Gluon is the part of Triton with direct access to WGMMA. It changes between Triton versions: if one of an operation's
Gluon kernels does not compile, the operation's portable kernels run instead for the rest of the process, and
`impl="gluon"` is an error.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from types import TracebackType
from typing import Any, get_args

import torch
from torch import Tensor

from tokenmix_core.kernels.launch.cache.capture import is_plain
from tokenmix_core.kernels.launch.cache.replay import invalidate
from tokenmix_core.kernels.launch.errors import NotCompiled
from tokenmix_core.ops.types import Impl

HALF = (torch.bfloat16, torch.float16)
# the first Triton version whose Gluon has all functions that the kernels use
OLDEST = (3, 6)
# errors raised if a Gluon kernel does not compile, or if its module uses a name that this Triton version lacks
GLUON_ERRORS = (NotCompiled, ImportError, AttributeError)

_forms: list[GluonForm] = []
# the chip that the context manager `kernels_of` has set, such as "sm_89"; None outside of it
_chip: str | None = None


class GluonForm:
    """The Gluon kernels of an operation: on which devices they run, and whether they compiled.

    Args:
        op: the operation's name in warnings and errors.
        package: the name of the package or module that defines the kernels.
        dtypes: supported dtypes of the inputs.
        slower: the portable kernels' speed relative to Gluon's, as text, such as "about 2 to 3 times slower".
    """

    def __init__(self, op: str, package: str, *, dtypes: Sequence[torch.dtype] = HALF, slower: str) -> None:
        self.op, self.package, self.dtypes, self.slower = op, package, tuple(dtypes), slower
        # the error that disabled the kernels in this process
        self.failure: str | None = None
        self._warned = False
        _forms.append(self)

    def limit(self, device: torch.device, dtype: torch.dtype) -> str | None:
        """Return why the kernels do not support this device and dtype, as a clause, or None; compiles nothing."""
        if (why := device_limit(device)) is not None:
            return why
        if dtype not in self.dtypes:
            return f"takes {' and '.join(map(_name, self.dtypes))}, got {_name(dtype)}"
        return None

    def require(self, op: str, device: torch.device, dtype: torch.dtype, limit: str | None = None) -> None:
        """Raise a ValueError that names `op` if the kernels do not support the device or dtype, or `limit` is not None.

        `limit` is the reason, as a clause. Under tracing, nothing is checked.
        """
        # under tracing do nothing: the compiled call checks at run time
        if torch.compiler.is_compiling():
            return
        why = self.limit(device, dtype) or limit
        if why is not None:
            raise ValueError(
                f"{op}: impl='gluon' {why}; pass impl='triton' for the portable kernels, or None for the fastest here"
            )

    def runs(
        self, impl: str | None, device: torch.device, dtype: torch.dtype, limit: str | None = None, op: str = ""
    ) -> bool:
        """Tell whether a call with `impl` (None, "gluon" or "triton") launches Gluon kernels.

        Warn once if `impl` is None, and the kernels did not compile.

        Raises:
            ValueError: `impl` is "gluon", and the kernels do not support the device or dtype, or `limit` is given.
            NotCompiled: `impl` is "gluon", and the kernels did not compile.
        """
        if impl == "triton":
            return False
        if impl == "gluon":
            self.require(op or self.op, device, dtype, limit)
        elif self.limit(device, dtype) is not None or limit is not None:
            return False
        if self.failure is None:
            return True
        if impl == "gluon":
            raise NotCompiled(
                f"{self.op}: impl='gluon' was asked for, but with Triton {version('triton')} {self.failure}; pass "
                "impl='triton' for the portable kernels, or None for the fastest here",
                self.package,
            )
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"{self.op}: with Triton {version('triton')} {self.failure}; portable kernels run instead in this "
                f"process, {self.slower}",
                stacklevel=2,
            )
        return False


def device_limit(device: torch.device) -> str | None:
    """Return why Gluon kernels do not run on a device, or on the chip of `kernels_of` if set, as a clause, or None."""
    if _chip is None:
        return _limit_here(device)
    return None if _chip == "sm_90" else f"needs a CUDA device of compute capability 9 (Hopper), got {_chip}"


@functools.cache
def _limit_here(device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"needs a CUDA device of compute capability 9 (Hopper), got {device}"
    major, minor = torch.cuda.get_device_capability(device)
    if major != 9 or torch.version.hip is not None:
        name = torch.cuda.get_device_name(device)
        return f"needs a CUDA device of compute capability 9 (Hopper), got {name} of {major}.{minor}"
    import triton

    if tuple(map(int, triton.__version__.split(".")[:2])) < OLDEST:
        return f"needs Triton {'.'.join(map(str, OLDEST))} or newer, got {triton.__version__}"
    return None


def give_up(error: Exception) -> None:
    """Disable the Gluon kernels that raised one of `GLUON_ERRORS`: portable kernels run from now on.

    The error is raised again if it does not come from Gluon kernels, or if these kernels are already disabled.
    """
    module = error.module if isinstance(error, NotCompiled) else _imported(error.__traceback__)
    form = max((x for x in _forms if f"{module}.".startswith(f"{x.package}.")), key=lambda x: x.package, default=None)
    if form is None or form.failure is not None:
        raise error
    # keep only the error's text, because its stack frames would keep tensors in memory
    form.failure = " ".join(str(error).split())
    # drop cached calls, which would still launch these kernels
    invalidate()


def _imported(traceback: TracebackType | None) -> str:
    """Return the name of the Gluon module whose import raised the error; "" if the error has another origin."""
    name = ""
    while traceback is not None:
        frame = traceback.tb_frame
        if frame.f_code.co_name == "<module>" and any(x.package in frame.f_globals["__name__"] for x in _forms):
            name = frame.f_globals["__name__"]
        traceback = traceback.tb_next
    return name


# end of an error message: Triton's interpreter multiplies bfloat16 bits as integers, so its results are wrong
NOT_INTERPRETED = "takes float16 and float32 in Triton's interpreter, got bfloat16; pass impl='reference'"


def interpreting() -> bool:
    """Tell whether Triton kernels run in Triton's interpreter (`TRITON_INTERPRET=1`)."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


@contextmanager
def kernels_of(chip: str) -> Iterator[None]:
    """Context manager: select kernels for meta tensors as on a chip such as "sm_89"; nothing can be launched inside."""
    global _chip
    before, _chip = _chip, chip
    try:
        yield
    finally:
        _chip = before


def kernels_run(device: str) -> bool:
    """Tell whether Triton kernels run on a device type such as "cuda"; inside `kernels_of` they run on every type."""
    return device == "cuda" or interpreting() or _chip is not None


def resolve_impl(op: str, impl: str | None, x: Tensor, gluon: GluonForm | None = None) -> str | None:
    """Return the implementation of a call: `impl` or, if `impl` is None and x is not on CUDA, "reference".

    For CUDA tensors None is returned as None, which stands for the operation's kernels, in Gluon if Gluon runs.

    Args:
        gluon: the operation's Gluon kernels, if it has any.

    Raises:
        ValueError: `impl` is unknown; `impl` is "gluon", and Gluon kernels do not run; or `impl` is "triton", and x is
            on a CPU without Triton's interpreter, or x is bfloat16 and runs in the interpreter.
    """
    if impl is None:
        return None if x.is_cuda else "reference"
    if impl not in get_args(Impl):
        raise ValueError(f"{op}: impl must be None or one of {', '.join(map(repr, get_args(Impl)))}, got {impl!r}")
    if impl == "gluon":
        if gluon is None:
            raise ValueError(f"{op}: impl='gluon' is not there, as it has no kernels in Gluon; pass impl='triton'")
        gluon.require(op, x.device, x.dtype)
    if impl == "triton" and not kernels_run(x.device.type):
        raise ValueError(
            f"{op}: impl='triton' needs CUDA tensors, got tensors on {x.device}; "
            "pass impl='reference', or set TRITON_INTERPRET=1 to run the kernels on a CPU"
        )
    if impl == "triton" and x.device.type == "cpu" and x.dtype == torch.bfloat16:
        raise ValueError(f"{op}: impl='triton' {NOT_INTERPRETED}")
    return impl


def by_reference(op: str, why: str | None, device: str, dtype: torch.dtype) -> str:
    """Return "reference"; on a GPU, warn once that it runs instead of kernels, for the reason `why`.

    There is no warning if `why` is None, for float64, and under torch.compile.
    """
    if device == "cuda" and dtype != torch.float64 and why is not None and not torch.compiler.is_compiling():
        _warn_of_reference(f"{op}: impl='triton' {why.partition('; pass')[0]}")
    return "reference"


@functools.cache
def _warn_of_reference(limit: str) -> None:
    warnings.warn(f"{limit}: the reference runs, which is slower and takes more memory", RuntimeWarning, stacklevel=5)


def unless_gluon(impl: Any) -> Any:
    """Return None for "gluon", else `impl`: modules pass the result to operations that may lack Gluon kernels."""
    return None if impl == "gluon" else impl


def row_impl(op: str, impl: str | None, x: Tensor) -> str:
    """Return "triton" or "reference" for an operation on rows, such as a norm between two matmuls.

    `impl=None` selects "triton" for CUDA tensors in eager mode. Under tracing or a dispatch mode, and for float64, the
    result is "reference", also for `impl="triton"`: compilers fuse the operation with its neighbours.

    Raises:
        ValueError: see `resolve_impl`.
    """
    found = resolve_impl(op, impl, x)
    return "reference" if found == "reference" or x.dtype == torch.float64 or not is_plain(x) else "triton"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
