"""Kernels compiled for Hopper on a machine without a GPU, with the arguments that calls of operations give them.

Triton decides at its import whether it compiles or interprets, so that this needs a process of its own.
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import pytest
import torch

from tokenmix_core.kernels.launch import compat
from tokenmix_core.kernels.launch.pdl import PDL

# bytes of shared memory that a block may have on Hopper
_SHARED_MEMORY = 232_448
# set to 1, all kernels of the calls are compiled, and not only the first call's of each
_EVERY = "TOKENMIX_EVERY_KERNEL"


def without_gpu(test: Callable) -> Callable:
    """Mark a test that compiles many kernels, which takes minutes and no GPU: where there is one, all tests do."""
    there = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled there by all tests")
    return pytest.mark.slow(pytest.mark.timeout(3600)(there(test)))


def compiled_by(script: str, *, every: bool = False) -> list[dict]:
    """Run `compile_calls` of a script in a process of its own and return what it prints; its errors are raised here.

    With `every` all kernels of the calls are compiled, and not only the first call's of each.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {_EVERY: "1"} if every else {}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(f"{script} ended with {done.returncode}: {done.stderr[-4000:]}")
    return [json.loads(line) for line in done.stdout.splitlines()]


def assert_all_fit(kernels: Iterable[dict]) -> None:
    """Assert that all kernels of `compiled_by` compiled and that their shared memory fits into an SM."""
    assert [x for x in kernels if x["error"] or x["shared"] > _SHARED_MEMORY] == []


def compile_calls(calls: Mapping[str, Callable[[], object]], *packages: str, portable: bool = False) -> None:
    """Make the calls, whose tensors lie on the CPU, compile the Gluon kernels they would launch and print a line each.

    With `portable` the others are compiled instead; kernels with PDL are compiled with and without it.

    A line is JSON with the call, the kernel, `shared`, its bytes of shared memory, and `error`, None where it compiled.
    `packages` hold the operations.
    """
    from tokenmix_core.kernels.launch.launcher import Launch, taken

    _pretend(packages)
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
            error, shared = None, 0
            try:
                for taken_args, taken_options in _forms(kernel.fn, args, options):
                    made = kernel.fn.warmup(*taken_args, grid=grid, **taken_options)
                    shared = max(shared, made.metadata.shared)
            except Exception as failure:
                error = f"{type(failure).__name__}: {failure}"
            print(json.dumps({"call": call, "kernel": name, "shared": shared, "error": error}), flush=True)


def _forms(kernel: Any, args: tuple, options: dict) -> Iterator[tuple[tuple, dict]]:
    """Return a launch, and the same launch with PDL."""
    yield args, options
    if compat.argument_names(kernel)[-1] == PDL:
        yield (*args[:-1], True), {**options, "launch_pdl": True}


class _Hopper:
    """The part of a Triton driver that the compiler uses, for Hopper."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> object:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


def _pretend(packages: tuple[str, ...]) -> None:
    """Let this process take its CPU for a Hopper GPU, wherever modules under these packages ask."""
    from triton.runtime.driver import driver

    from tokenmix_core.ops import dispatch

    driver.set_active(_Hopper())  # type: ignore[arg-type]
    # the first as tensors on a CPU are else refused
    answers = {dispatch.interpreting: lambda: True, dispatch.device_limit: lambda device: None}
    for package in packages:
        for module in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
            importlib.import_module(module.name)
    for module in list(sys.modules.values()):
        for name, value in list(vars(module).items()):
            for asked, answer in answers.items():
                if value is asked:
                    setattr(module, name, answer)
