"""Tell whether an operation's kernels in Gluon run: decided here for all operations, and what if one does not compile.

Gluon is the part of Triton that speaks to Hopper's matrix units directly. It still changes between versions, so that
kernels in it are tried, and where one does not compile the operation's portable kernels take over for the process.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from importlib.metadata import version
from types import TracebackType

import torch

from tokenmix_core.kernels.launch.cache.replay import invalidate
from tokenmix_core.kernels.launch.errors import NotCompiled

HALF = (torch.bfloat16, torch.float16)
# of Triton, whose Gluon has all that the kernels are written with
OLDEST = (3, 6)
# what a call raises where a kernel in Gluon is not to be had: a module of them may fail where names are gone
NOT_TO_BE_HAD = (NotCompiled, ImportError, AttributeError)

_forms: list[GluonForm] = []


class GluonForm:
    """An operation's kernels in Gluon: where they run, and whether they compiled.

    Args:
        op: the operation, as warnings and errors name it.
        package: the name of the package, or module, that the kernels are defined in.
        dtypes: of the inputs that they take.
        slower: how the portable kernels compare, such as "about 2 to 3 times slower".
    """

    def __init__(self, op: str, package: str, *, dtypes: Sequence[torch.dtype] = HALF, slower: str) -> None:
        self.op, self.package, self.dtypes, self.slower = op, package, tuple(dtypes), slower
        # why the kernels were given up in this process
        self.failure: str | None = None
        self._warned = False
        _forms.append(self)

    def limit(self, device: torch.device, dtype: torch.dtype) -> str | None:
        """Why the kernels take no tensors like these, as a clause; None where they do. What compiles is not asked."""
        if (why := device_limit(device)) is not None:
            return why
        if dtype not in self.dtypes:
            return f"takes {' and '.join(map(_name, self.dtypes))}, got {_name(dtype)}"
        return None

    def require(self, op: str, device: torch.device, dtype: torch.dtype, limit: str | None = None) -> None:
        """Raise a ValueError, beginning with `op`, if the kernels do not take such tensors or there is a `limit`."""
        # a call that is traced asks when it runs
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
        """Tell whether kernels in Gluon are to be launched for a call that asks for `impl`: None, "gluon" or "triton".

        Raises:
            ValueError: "gluon" where the kernels do not run, or there is a `limit` of their own.
            NotCompiled: "gluon" where they did not compile.
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


@functools.cache
def device_limit(device: torch.device) -> str | None:
    """Why kernels in Gluon do not run on a device, as a clause; None where they do."""
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
    """Let portable kernels run from now on in place of those that raised one of `NOT_TO_BE_HAD`.

    Raises the error itself where it says nothing of kernels in Gluon, or of some that were given up before.
    """
    module = error.module if isinstance(error, NotCompiled) else _imported(error.__traceback__)
    form = max((x for x in _forms if f"{module}.".startswith(f"{x.package}.")), key=lambda x: x.package, default=None)
    if form is None or form.failure is not None:
        raise error
    # not the error itself, whose frames hold tensors
    form.failure = " ".join(str(error).split())
    # cached calls would launch it
    invalidate()


def _imported(traceback: TracebackType | None) -> str:
    """The module whose import failed below a call; empty if none did."""
    name = ""
    while traceback is not None:
        frame = traceback.tb_frame
        if frame.f_code.co_name == "<module>" and any(x.package in frame.f_globals["__name__"] for x in _forms):
            name = frame.f_globals["__name__"]
        traceback = traceback.tb_next
    return name


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
