"""Kernels compiled for a chip on a machine without a GPU, with the arguments that calls of operations give them.

Triton decides at its import whether it compiles or interprets, so that this needs a process of its own.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import pkgutil
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import pytest
import torch

from tokenmix_core.kernels.launch import compat
from tokenmix_core.kernels.launch.pdl import PDL
from tokenmix_core.ops.explanation import CHIPS

# set to 1, all kernels of the calls are compiled, and not only the first call's of each
_EVERY = "TOKENMIX_EVERY_KERNEL"
# the chip to compile for
_CHIP = "TOKENMIX_CHIP"
# runs a script as on an AMD GPU, which modules of kernels read when they are imported
_ON_AMD = (
    "import runpy, sys, torch; torch.version.hip = 'compiled without a GPU'; del sys.argv[0]; "
    "runpy.run_path(sys.argv[0], run_name='__main__')"
)


def without_gpu(test: Callable) -> Callable:
    """Mark a test that compiles many kernels, which takes minutes and no GPU: where there is one, all tests do."""
    there = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled there by all tests")
    return pytest.mark.slow(pytest.mark.timeout(3600)(there(test)))


def compiled_by(script: str, *arguments: str, every: bool = False, chip: str = "sm_90") -> list[dict]:
    """Run `compile_calls` of a script in a process of its own and return what it prints; its errors are raised here.

    With `every` all kernels of the calls are compiled, and not only the first call's of each.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {_CHIP: chip} | ({_EVERY: "1"} if every else {})
    program = ["-c", _ON_AMD, script] if chip.startswith("gfx") else [script]
    done = subprocess.run([sys.executable, *program, *arguments], capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(f"{script} ended with {done.returncode}: {done.stderr[-4000:]}")
    return [json.loads(line) for line in done.stdout.splitlines()]


def assert_all_fit(kernels: Iterable[dict]) -> None:
    """Assert that all kernels of `compiled_by` compiled and that their shared memory fits into an SM."""
    assert [x for x in kernels if x["error"] or x["shared"] > CHIPS["sm_90"]] == []


def compile_calls(calls: Mapping[str, Callable[[], object]], *packages: str, portable: bool = False) -> None:
    """Make the calls, whose tensors lie on the CPU, compile the Gluon kernels they would launch and print a line each.

    With `portable` the others are compiled instead; kernels with PDL are compiled with and without it.

    A line is JSON with the call, the kernel, `shared`, its bytes of shared memory, `spilled`, the bytes of registers
    that a thread spills, and `error`, None where it compiled. Portable kernels are reduced until they fit the chip.
    `packages` hold the operations.
    """
    chip = os.environ.get(_CHIP, "sm_90")
    from tokenmix_core.kernels.launch import fit
    from tokenmix_core.kernels.launch.launcher import Launch, taken

    _pretend(packages, chip)
    every, seen = os.environ.get(_EVERY) == "1", set()
    for call, make in calls.items():
        launches: list[Launch] = []
        with taken(launches.append):
            make()
        for kernel, grid, args, options in launches:
            if kernel.fn.is_gluon() is portable:
                continue
            name = f"{kernel.fn.fn.__module__}.{kernel.fn.fn.__name__}"
            kind = name, *(x.dtype if isinstance(x, torch.Tensor) else x for x in args), *options.values()
            if (kind if every else name) in seen:
                continue
            seen.add(kind if every else name)
            error, shared, spilled = None, 0, 0
            try:
                for taken_args, taken_options in _forms(kernel.fn, args, options, chip):
                    log, limit = io.StringIO(), CHIPS[chip] if portable else None
                    with contextlib.redirect_stdout(log):
                        made, *_ = fit.compiled(kernel.fn, grid, taken_args, taken_options, kernel.loop_tiles, limit)
                    shared, spilled = max(shared, made.metadata.shared), max(spilled, _spilled(made, log.getvalue()))
            except Exception as failure:
                error = f"{type(failure).__name__}: {failure}"
            line = {"call": call, "kernel": name, "shared": shared, "spilled": spilled, "error": error}
            print(json.dumps(line), flush=True)


def _spilled(made: Any, log: str) -> int:
    """Return the bytes of registers that a thread of a compiled kernel spills, from its assembly or from ptxas' log."""
    if "amdgcn" in made.asm:
        return 4 * int(re.findall(r"\.vgpr_spill_count:\s*(\d+)", made.asm["amdgcn"])[0])
    # the log of a kernel that did not fit comes first
    return int(re.findall(r"(\d+) bytes spill stores", log)[-1])


def _forms(kernel: Any, args: tuple, options: dict, chip: str) -> Iterator[tuple[tuple, dict]]:
    """Return a launch, and the same launch with PDL if the chip has it."""
    yield args, options
    if compat.argument_names(kernel)[-1] == PDL and chip in ("sm_90", "sm_100", "sm_120"):
        yield (*args[:-1], True), {**options, "launch_pdl": True}


class _Driver:
    """The part of a Triton driver that the compiler uses."""

    def __init__(self, chip: str) -> None:
        self.chip = chip

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> object:
        from triton.backends.compiler import GPUTarget

        cuda = self.chip.startswith("sm_")
        return GPUTarget("cuda", int(self.chip[3:]), 32) if cuda else GPUTarget("hip", self.chip, 64)


def _pretend(packages: tuple[str, ...], chip: str = "sm_90") -> None:
    """Let this process take its CPU for a GPU, wherever modules under these packages ask."""
    import triton
    from triton.runtime.driver import driver

    from tokenmix_core.kernels import tuning
    from tokenmix_core.ops import dispatch

    driver.set_active(_Driver(chip))  # type: ignore[arg-type]
    # ptxas' log has the spills; a compiled kernel of the disk cache has no log
    knobs: Any = triton.knobs  # type: ignore[attr-defined]
    knobs.nvidia.dump_ptxas_log = knobs.compilation.always_compile = True
    limit = None if chip == "sm_90" else f"needs a CUDA device of compute capability 9 (Hopper), got {chip}"
    answers = {
        # tensors on a CPU are else refused
        dispatch.interpreting: lambda: True,
        dispatch.resolve_impl: lambda op, impl, x, gluon=None: impl,
        dispatch.device_limit: lambda device: limit,
        tuning.block_memory: lambda: CHIPS[chip],
    }
    for package in packages:
        for module in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
            importlib.import_module(module.name)
    for module in list(sys.modules.values()):
        for name, value in list(vars(module).items()):
            for asked, answer in answers.items():
                if value is asked:
                    setattr(module, name, answer)
