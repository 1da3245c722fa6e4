"""Compile kernels for a chip on a machine without a GPU, with the arguments of real calls of operations.

Triton decides at its import whether it compiles or interprets, so compilation needs a process of its own.
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
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tokenmix_core.kernels.launch import compat
from tokenmix_core.kernels.launch.pdl import PDL
from tokenmix_core.ops.explanation import CHIPS

# environment variable; 1 compiles a kernel for all its launches with different arguments, not only for the first
_EVERY = "TOKENMIX_EVERY_KERNEL"
# environment variable that names the chip to compile for
_CHIP = "TOKENMIX_CHIP"
# a program that runs a script as if on an AMD GPU: modules of kernels read `torch.version.hip` at import
_ON_AMD = (
    "import runpy, sys, torch; torch.version.hip = 'compiled without a GPU'; del sys.argv[0]; "
    "runpy.run_path(sys.argv[0], run_name='__main__')"
)


def without_gpu(test: Callable) -> Callable:
    """Mark a test that compiles kernels for minutes; machines with a GPU skip it: their other tests compile kernels."""
    there = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled there by all tests")
    return pytest.mark.slow(pytest.mark.timeout(3600)(there(test)))


def compiled_by(
    script: str, *arguments: str, every: bool = False, chip: str = "sm_90", log: Path | None = None
) -> list[dict]:
    """Run, in a process of its own, a script that calls `compile_calls`; return the printed lines that name a kernel.

    With `every`, all launches of a kernel with different arguments are compiled, not only the first. The lines are
    appended to the file `log`, whose lines of earlier runs are also returned.

    Raises:
        RuntimeError: the script failed.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {_CHIP: chip} | ({_EVERY: "1"} if every else {})
    program = ["-c", _ON_AMD, script] if chip.startswith("gfx") else [script]
    with log.open("a+") if log else tempfile.TemporaryFile("w+") as lines:
        command = [sys.executable, *program, *arguments]
        done = subprocess.run(command, stdout=lines, stderr=subprocess.PIPE, text=True, env=environment)
        if done.returncode:
            raise RuntimeError(f"{script} ended with {done.returncode}: {done.stderr[-4000:]}")
        lines.seek(0)
        return [x for line in lines if (x := json.loads(line))["kernel"]]


def assert_all_fit(kernels: Iterable[dict]) -> None:
    """Assert that all kernels returned by `compiled_by` have compiled, and that none exceeds a block's shared memory.

    The limit is that of Hopper (sm_90), whatever chip the kernels were compiled for.
    """
    assert [x for x in kernels if x["error"] or x["shared"] > CHIPS["sm_90"]] == []


def compile_calls(
    calls: Mapping[str, Callable[[], object]],
    *packages: str,
    portable: bool = False,
    chips: Mapping[str, str] | None = None,
    seconds: float = float("inf"),
) -> None:
    """Make calls with tensors on the CPU, compile the Gluon kernels that they launch, and print a line per kernel.

    A line is JSON with the call, the kernel, the bytes of shared memory (`shared`), the bytes of registers that a
    thread spills (`spilled`) and the `error`, or None. For a call without kernels, the line has None as the kernel. The
    tiles of portable kernels are made smaller until they fit on the chip. If kernel and chip support PDL, the kernel is
    compiled only with PDL; with `every` of `compiled_by`, Gluon kernels are compiled with and without it.

    Args:
        calls: functions that make the calls, by name.
        packages: names of the packages that contain the operations.
        portable: compile the Triton kernels instead of the Gluon kernels.
        chips: for calls by name, another chip than that of `compiled_by`; either all chips are NVIDIA's, or none is.
        seconds: no call begins later than this many seconds after the start.
    """
    from tokenmix_core.kernels.launch import fit
    from tokenmix_core.kernels.launch.launcher import Launch, taken

    start, default = time.monotonic(), os.environ.get(_CHIP, "sm_90")
    driver = _pretend(packages, default)
    every, seen = os.environ.get(_EVERY) == "1", set()
    spills: dict[str, int] = {}
    for call, make in calls.items():
        if time.monotonic() - start > seconds:
            return
        driver.chip = chip = (chips or {}).get(call, default)
        launches: list[Launch] = []
        lines: list[dict] = []
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
            forms = [*_forms(kernel.fn, args, options, chip)]
            try:
                for taken_args, taken_options in forms if every and not portable else forms[-1:]:
                    log, limit = io.StringIO(), CHIPS[chip] if portable else None
                    with contextlib.redirect_stdout(log):
                        made, *_ = fit.compiled(kernel.fn, grid, taken_args, taken_options, kernel.loop_tiles, limit)
                    # Triton reuses an equal kernel that it has compiled before, without a new log
                    if made.hash not in spills:
                        spills[made.hash] = _spilled(made, log.getvalue())
                    shared, spilled = max(shared, made.metadata.shared), max(spilled, spills[made.hash])
            except Exception as failure:
                error = f"{type(failure).__name__}: {failure}"
            lines.append({"call": call, "kernel": name, "shared": shared, "spilled": spilled, "error": error})
        # print all lines of a call together, so that a killed run leaves no incomplete call
        print(*map(json.dumps, lines or [{"call": call, "kernel": None}]), sep="\n", flush=True)


def _spilled(made: Any, log: str) -> int:
    """Return the bytes of registers that a thread of a kernel spills, read from the assembly or from ptxas' log."""
    if "amdgcn" in made.asm:
        return 4 * int(re.findall(r"\.vgpr_spill_count:\s*(\d+)", made.asm["amdgcn"])[0])
    # take the last entry: earlier ones are of attempts that did not fit
    return int(re.findall(r"(\d+) bytes spill stores", log)[-1])


def _forms(kernel: Any, args: tuple, options: dict, chip: str) -> Iterator[tuple[tuple, dict]]:
    """Yield a launch's arguments and options; yield them also with PDL if the kernel and the chip support it."""
    yield args, options
    if compat.argument_names(kernel)[-1] == PDL and chip in ("sm_90", "sm_100", "sm_120"):
        yield (*args[:-1], True), {**options, "launch_pdl": True}


class _Driver:
    """Replaces those parts of Triton's driver that the compiler uses, for a chip that this machine does not have."""

    def __init__(self, chip: str) -> None:
        self.chip = chip

    def get_current_device(self) -> int:
        # one device index per chip: Triton caches target and kernels by device
        return list(CHIPS).index(self.chip)

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> object:
        from triton.backends.compiler import GPUTarget

        cuda = self.chip.startswith("sm_")
        return GPUTarget("cuda", int(self.chip[3:]), 32) if cuda else GPUTarget("hip", self.chip, 64)


def _pretend(packages: tuple[str, ...], chip: str) -> _Driver:
    """Make all modules in these packages treat the CPU of this process as a GPU; return the driver of that GPU."""
    import triton
    from triton.runtime.driver import driver

    from tokenmix_core.kernels import tuning
    from tokenmix_core.ops import dispatch

    active = _Driver(chip)
    driver.set_active(active)  # type: ignore[arg-type]
    # spills are reported only in ptxas' log, which kernels from the disk cache lack
    knobs: Any = triton.knobs  # type: ignore[attr-defined]
    knobs.nvidia.dump_ptxas_log = knobs.compilation.always_compile = True

    def limit(device: torch.device) -> str | None:
        hopper = active.chip == "sm_90"
        return None if hopper else f"needs a CUDA device of compute capability 9 (Hopper), got {active.chip}"

    answers = {
        # without this substitute, tensors on a CPU would be refused
        dispatch.interpreting: lambda: True,
        dispatch.resolve_impl: lambda op, impl, x, gluon=None: impl,
        dispatch.device_limit: limit,
        tuning.block_memory: lambda: CHIPS[active.chip],
    }
    for package in packages:
        for module in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
            # skip these modules, which import vLLM
            if ".integrations.vllm." not in module.name:
                importlib.import_module(module.name)
    for module in list(sys.modules.values()):
        for name, value in list(vars(module).items()):
            for asked, answer in answers.items():
                if value is asked:
                    setattr(module, name, answer)
    return active
