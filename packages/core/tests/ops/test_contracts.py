"""Test that every operation of this package has a contract test, and that every operator passes torch's checks."""

from pathlib import Path

import tokenmix_core
from support.operation_coverage import described, operations_of, unchecked
from tokenmix_core import ops

# operations that have tests of their own instead of a contract
OTHERWISE = {
    "delta_layer_step": "test_delta_layer.py",
    "rotate_step": "test_rotate_step.py",
    "short_convs": "test_short_conv.py",
}


def test_no_operation_is_without_a_contract():
    assert described(Path(__file__).parent) == operations_of(ops) - OTHERWISE.keys()


def test_torch_checks_every_operator():
    assert not unchecked(tokenmix_core, Path(__file__).parents[1])
