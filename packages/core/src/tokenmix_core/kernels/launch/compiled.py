"""Read properties of compiled kernels from Triton; one warning names the attributes that this version lacks."""

from __future__ import annotations

from typing import Any, NamedTuple

from tokenmix_core.kernels.launch import compat
from tokenmix_core.kernels.launch.compat import OWN_LAUNCH, lacks


class Described(NamedTuple):
    """Properties of a compiled kernel, read from Triton.

    Attributes:
        name: the name of the kernel's function.
        binary: the machine code.
        types: Triton's types of the arguments.
        backend: "cuda" or another of Triton's backends.
        warps: warps of a program.
        ctas: programs of a cluster.
        shared: bytes of shared memory of a program.
        pdl: whether the kernel is launched with programmatic dependent launch.
        more: whether a launch needs more than the kernel's arguments, e.g. scratch memory.
    """

    name: str
    binary: bytes
    types: list[Any]
    backend: str
    warps: int
    ctas: int
    shared: int
    pdl: bool
    more: bool


def described(kernel: Any) -> Described | None:
    """Return the properties of a compiled kernel that our own launches need; None if some are unknown."""
    try:
        x, types = kernel.metadata, list(kernel.src.signature.values())
        # some versions of Triton lack instrumentation_mode and launch_cooperative_grid
        more = x.global_scratch_size or x.profile_scratch_size
        more = more or any(getattr(x, name, 0) for name in ("instrumentation_mode", "launch_cooperative_grid"))
        sizes = x.target.backend, x.num_warps, x.num_ctas, x.shared
        return Described(kernel.name, kernel.kernel, types, *sizes, bool(getattr(x, "launch_pdl", False)), bool(more))
    except AttributeError as error:
        lacks("triton's compiled kernel", error, OWN_LAUNCH)
        return None


def put_on_device(kernel: Described, device: int) -> tuple[int, int] | None:
    """Load a kernel; return CUDA's handle of it and the maximum number of its threads.

    Return None if this version of Triton lacks the functions that load it.
    """
    names = compat.launching()
    if names is None:
        return None
    try:
        load = names.driver.active.utils.load_binary
    except AttributeError as error:
        lacks("triton.runtime.driver.driver.active", error, OWN_LAUNCH)
        return None
    _, function, _, _, most = load(kernel.name, kernel.binary, kernel.shared, device)
    return function, most
