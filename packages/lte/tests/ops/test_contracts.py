"""Every operation of this package has a contract test, and every operator passes torch's own checks."""

from pathlib import Path

import tokenmix_lte
from support.operation_coverage import described, operations_of, unchecked
from tokenmix_lte import ops


def test_every_operation_has_a_contract():
    assert described(Path(__file__).parent) == operations_of(ops)


def test_torch_checks_every_operator():
    assert not unchecked(tokenmix_lte, Path(__file__).parents[1])
