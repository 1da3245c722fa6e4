"""Every operation of this package is held to a contract."""

from pathlib import Path

from tokenmix_core import ops
from tokenmix_core.testing.operations import described, operations_of

# operations with tests of their own in place of a contract
OTHERWISE = {"delta_layer_step": "test_delta_layer.py", "short_convs": "test_short_conv.py"}


def test_no_operation_is_without_a_contract():
    assert described(Path(__file__).parent) == operations_of(ops) - OTHERWISE.keys()
