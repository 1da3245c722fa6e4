"""Test that operations on sequences that are split over processes have the values and gradients of one process."""

from __future__ import annotations

import pytest

from support.rank_pool import ranks
from support.split_contract import CASES, check_operations, require_equality
from support.split_overlap import order_of_exchanges


@pytest.mark.parametrize("size", ranks(2, 3, 4))
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_those_of_one_process(pool, size, name):
    require_equality(pool(size, check_operations, [name]))


@pytest.mark.parametrize("size", ranks(2, 3, 4))
@pytest.mark.parametrize("name", [name for name in CASES if "short" not in name and "shift" not in name])
def test_groups_of_heads_give_the_values_and_gradients_of_one_process(pool, size, name):
    require_equality(pool(size, check_operations, [name], 1))


def test_keys_of_one_group_of_heads_travel_while_another_group_is_computed(pool):
    forward, backward = pool(2, order_of_exchanges, "attention")
    assert forward == ["begin", "begin", "wait", "compute", "wait", "compute"]
    assert backward == ["gradient", "begin", "gradient", "begin", "wait", "wait"]


@pytest.mark.parametrize("name", ["gated delta rule", "ssd"])
def test_states_of_one_group_of_heads_travel_while_another_group_is_computed(pool, name):
    forward, backward = pool(2, order_of_exchanges, name)
    # a state's computation, which is a call for the gated delta rule alone, runs while the transition travels
    maps = ["begin", "compute", "begin"] if name == "gated delta rule" else ["begin", "begin"]
    assert forward == [*maps, *maps, "wait", "wait", "compute", "wait", "wait", "compute"]
    assert backward == ["begin", "begin", "wait", "gradient", "wait", "gradient"]
