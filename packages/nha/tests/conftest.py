"""Kernels run on the GPU where there is one, else in Triton's interpreter; tests marked `gpu` need one."""

import os

import pytest
import torch

from tokenmix_core.testing.recorded import forgotten_with_changes

if not torch.cuda.is_available():
    # before any test module imports triton
    os.environ["TRITON_INTERPRET"] = "1"

torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def calls_are_recorded_anew(monkeypatch):
    yield from forgotten_with_changes(monkeypatch)
