"""Operations on sequences that are split over processes give the values and gradients of one process."""

from __future__ import annotations

import pytest

from tokenmix_core.testing.split_contract import CASES, TOLERANCE, check_operations


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_those_of_one_process(pool, size, name):
    errors = pool(size, check_operations, [name])
    worst = max(errors, key=lambda key: errors[key])
    assert errors[worst] <= TOLERANCE, f"{worst}: {errors[worst]:.2e}"
