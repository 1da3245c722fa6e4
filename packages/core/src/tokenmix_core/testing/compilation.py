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


def compiled_by(
    script: str, *arguments: str, every: bool = False, chip: str = "sm_90", log: Path | None = None
) -> list[dict]:
    """Run `compile_calls` of a script in a process of its own and return what it prints; its errors are raised here.

    With `every` all kernels of the calls are compiled, and not only the first call's of each. `log` is a file that
    the lines are appended to; lines of earlier runs are returned too.
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
    """Assert that all kernels of `compiled_by` compiled and that their shared memory fits into an SM."""
    assert [x for x in kernels if x["error"] or x["shared"] > CHIPS["sm_90"]] == []


def compile_calls(
    calls: Mapping[str, Callable[[], object]],
    *packages: str,
    portable: bool = False,
    chips: Mapping[str, str] | None = None,
    seconds: float = float("inf"),
) -> None:
    """Make the calls, whose tensors lie on the CPU, compile the Gluon kernels they would launch and print a line each.

    A line is JSON with the call, the kernel, `shared`, its bytes of shared memory, `spilled`, the bytes of registers
    that a thread spills, and `error`, None where it compiled. A call without kernels has a line without one. Portable
    kernels are reduced until they fit the chip.

    Args:
        calls: by name.
        packages: hold the operations.
        portable: compile the others instead. Only Gluon kernels of `every` also have the form without PDL.
        chips: of calls that are compiled for another chip than `compiled_by` names; all are NVIDIA's, or none is.
        seconds: after which no further call begins.
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
                    # arguments that Triton does not tell apart are compiled once, and logged once
                    if made.hash not in spills:
                        spills[made.hash] = _spilled(made, log.getvalue())
                    shared, spilled = max(shared, made.metadata.shared), max(spilled, spills[made.hash])
            except Exception as failure:
                error = f"{type(failure).__name__}: {failure}"
            lines.append({"call": call, "kernel": name, "shared": shared, "spilled": spilled, "error": error})
        # a call as a whole, so that a run that is ended leaves no part of one
        print(*map(json.dumps, lines or [{"call": call, "kernel": None}]), sep="\n", flush=True)


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
        # Triton remembers the target and the kernels of each device
        return list(CHIPS).index(self.chip)

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> object:
        from triton.backends.compiler import GPUTarget

        cuda = self.chip.startswith("sm_")
        return GPUTarget("cuda", int(self.chip[3:]), 32) if cuda else GPUTarget("hip", self.chip, 64)


def _pretend(packages: tuple[str, ...], chip: str) -> _Driver:
    """Let this process take its CPU for the GPU that the returned driver names, wherever modules under packages ask."""
    import triton
    from triton.runtime.driver import driver

    from tokenmix_core.kernels import tuning
    from tokenmix_core.ops import dispatch

    active = _Driver(chip)
    driver.set_active(active)  # type: ignore[arg-type]
    # ptxas' log has the spills; a compiled kernel of the disk cache has no log
    knobs: Any = triton.knobs  # type: ignore[attr-defined]
    knobs.nvidia.dump_ptxas_log = knobs.compilation.always_compile = True

    def limit(device: torch.device) -> str | None:
        hopper = active.chip == "sm_90"
        return None if hopper else f"needs a CUDA device of compute capability 9 (Hopper), got {active.chip}"

    answers = {
        # tensors on a CPU are else refused
        dispatch.interpreting: lambda: True,
        dispatch.resolve_impl: lambda op, impl, x, gluon=None: impl,
        dispatch.device_limit: limit,
        tuning.block_memory: lambda: CHIPS[active.chip],
    }
    for package in packages:
        for module in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
            # modules of the plug-in import vLLM
            if ".integrations.vllm." not in module.name:
                importlib.import_module(module.name)
    for module in list(sys.modules.values()):
        for name, value in list(vars(module).items()):
            for asked, answer in answers.items():
                if value is asked:
                    setattr(module, name, answer)
    return active
