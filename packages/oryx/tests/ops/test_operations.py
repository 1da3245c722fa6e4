"""Test the answers of `explain` for this package's operations, on a device treated as Hopper."""

import pytest
import torch

pytest.importorskip("triton")

from tokenmix_core.kernels import tuning
from tokenmix_core.ops import dispatch, explain
from tokenmix_oryx.ops import mix, selected_attention


@pytest.fixture
def hopper_device(monkeypatch, override):
    """Treat every device as a Hopper GPU with 132 SMs."""
    monkeypatch.setattr(dispatch, "device_limit", lambda device: None)
    override(tuning, sm_count=lambda device: 132)


def test_a_mixed_call_is_explained_mixer_by_mixer(hopper_device):
    told = explain(mix, device="meta", impl="gluon")
    assert told.impl == "gluon"
    assert "K=" not in told.call
    assert "H=16" in told.call
    assert told.kernels["convolutions, rotation, rates, gate and norm"] == "triton"
    assert told.kernels["attention: gradients of queries"] == "gluon"
    assert told.kernels["with D, SSD: outputs"] == "gluon"
    assert told.kernels["without D, the delta rule: chunks' terms"] == "gluon"


@pytest.mark.parametrize("operation", [mix, selected_attention])
def test_portable_kernels_are_explained_as_asked_for(operation, hopper_device):
    told = explain(operation, device="meta", impl="triton")
    assert told.why == "asked for"
    assert {form.split()[0].rstrip(",") for form in told.kernels.values()} == {"triton"}


@pytest.mark.parametrize("operation", [mix, selected_attention])
def test_a_cpu_runs_the_reference(operation):
    told = explain(operation, device="cpu", dtype=torch.float32)
    assert (told.impl, told.why) == ("reference", "kernels need a CUDA device")
