"""Test what the contract of operations assumes: descriptions are complete, and a refused launch is noticed."""

import pytest
import torch

pytest.importorskip("triton")

from tokenmix_core.ops import swiglu
from tokenmix_core.testing.launch_spies import no_launches, replays
from tokenmix_core.testing.operations import PROPERTIES, OpContract


def test_what_is_neither_described_nor_absent_is_named():
    with pytest.raises(TypeError, match="cases must be described, or be named in absent"):
        type("Undescribed", (OpContract,), {})


def test_an_absent_property_has_no_test():
    absent = type("Absent", (OpContract,), {"absent": dict.fromkeys(PROPERTIES, "nothing of it is there")})
    assert not any(callable(getattr(absent, name)) for name in dir(absent) if name.startswith("test_"))


def test_a_launch_is_refused(device):
    x = torch.ones(1, 2, 4, device=device)
    with no_launches(), pytest.raises(AssertionError, match="was launched"):
        swiglu(x, x.clone(), impl="triton")


def test_replays_are_counted(device):
    with replays() as made:
        for count in range(3):
            a, b = torch.randn(2, 1, 2, 4, device=device)
            torch.testing.assert_close(swiglu(a, b, impl="triton"), torch.nn.functional.silu(a) * b)
            assert made[0] == count
