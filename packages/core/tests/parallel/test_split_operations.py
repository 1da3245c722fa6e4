"""Operations on sequences that are split over processes give the values and gradients of one process."""

from __future__ import annotations

import pytest

from tokenmix_core.testing.rank_pool import ranks
from tokenmix_core.testing.split_contract import CASES, check_operations, require_equality


@pytest.mark.parametrize("size", ranks(2, 3, 4))
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_those_of_one_process(pool, size, name):
    require_equality(pool(size, check_operations, [name]))
