"""Fixtures for the conftest of every package: kernels run on a GPU if there is one, else in Triton's interpreter."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
import torch

from tokenmix_core.kernels import tuning
from tokenmix_core.kernels.launch.cache.replay import invalidate
from tokenmix_core.testing.interpreter import hurry, steady

if not torch.cuda.is_available():
    # set the variable here, because it must be set before any test module imports triton
    os.environ["TRITON_INTERPRET"] = "1"

torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` if there is no GPU."""
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """End the process if an earlier test has broken its GPU context, because all later tests would then fail.

    pytest-xdist starts a new worker process instead.
    """
    if not torch.cuda.is_available():
        return
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        if hasattr(item.config, "workerinput"):
            os._exit(1)
        pytest.exit(f"the GPU is lost since an earlier test: {error}", returncode=1)


@pytest.fixture
def device() -> str:
    """Return the device for tensors of tests that can run on any device."""
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="session", autouse=True)
def kernels_are_interpreted_quickly() -> None:
    """Make the interpreter faster, and its matmuls equal on all processors."""
    if not torch.cuda.is_available():
        hurry()
        steady()


@pytest.fixture(autouse=True)
def launch_cache_is_empty() -> None:
    """Invalidate the launch cache before each test, because an earlier test may have selected other kernels."""
    invalidate()


@pytest.fixture
def override() -> Iterator[Callable[..., None]]:
    """Return `tuning.override`; its changes are undone at the end of the test."""
    with ExitStack() as stack:
        yield lambda *table, **values: stack.enter_context(tuning.override(*table, **values))


@pytest.fixture(autouse=True)
def unwritten_memory_is_nan(request: pytest.FixtureRequest) -> Iterator[None]:
    """In tests below a folder `ops` whose kernels are interpreted, fill the memory of `torch.empty` with NaN.

    Elements that no kernel writes then show in the results.
    """
    poisoned = "ops" in request.path.parts and not torch.cuda.is_available()
    if poisoned:
        # deterministic mode fills uninitialised memory, which is its only effect needed here
        torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    if poisoned:
        torch.use_deterministic_algorithms(False)
