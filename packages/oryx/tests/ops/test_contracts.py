"""Every operation of this package is held to a contract."""

from pathlib import Path

from tokenmix_core.testing.operations import described, operations_of
from tokenmix_oryx import ops


def test_no_operation_is_without_a_contract():
    assert described(Path(__file__).parent) == operations_of(ops)
