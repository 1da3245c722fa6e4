"""Test that every operation of this package has a contract test, and that every operator passes torch's checks."""

from pathlib import Path

import tokenmix_nats_l
from support.operation_coverage import described, operations_of, unchecked
from tokenmix_nats_l import ops


def test_no_operation_is_without_a_contract():
    assert described(Path(__file__).parent) == operations_of(ops)


def test_torch_checks_every_operator():
    assert not unchecked(tokenmix_nats_l, Path(__file__).parents[1])
