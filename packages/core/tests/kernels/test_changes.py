"""Modules of tables tell of every change."""

import sys
from types import ModuleType

import pytest

from tokenmix_core.kernels import changes


@pytest.fixture
def module(monkeypatch):
    """A watched module with a number and two names of one table of tables, and what is told of its changes."""
    module = ModuleType("tables")
    module.number, module.table = 1, {"a": {1: "x"}, "b": 2}
    module.same = module.table
    monkeypatch.setitem(sys.modules, "tables", module)
    told = []
    monkeypatch.setattr(changes, "_listening", [lambda: told.append(1)])
    changes.watch("tables")
    return module, told


CHANGES = {
    "number": lambda x: setattr(x, "number", 2),
    "attribute deleted": lambda x: delattr(x, "number"),
    "item": lambda x: x.table.__setitem__("b", 3),
    "item deleted": lambda x: x.table.__delitem__("b"),
    "item of an item": lambda x: x.table["a"].__setitem__(1, "y"),
    "update": lambda x: x.table.update(b=3),
    "in place": lambda x: x.table.__ior__({"b": 3}),
    "clear": lambda x: x.table.clear(),
    "pop": lambda x: x.table.pop("b"),
    "popitem": lambda x: x.table.popitem(),
    "default": lambda x: x.table.setdefault("c", 3),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_every_change_is_told(module, change):
    module, told = module
    change(module)
    assert len(told) == 1


def test_a_change_that_fails_leaves_the_table(module):
    table = module[0].table
    with pytest.raises(KeyError):
        del table["c"]
    assert table == {"a": {1: "x"}, "b": 2}


def test_nobody_is_told_of_reading(module):
    module, told = module
    assert module.table["a"][1] == "x"
    assert module.table | {"b": 3} == {"a": {1: "x"}, "b": 3}
    assert module.number == 1
    assert not told


def test_one_table_under_two_names_stays_one(module):
    assert module[0].table is module[0].same


def test_a_table_that_is_set_tells_of_changes_too(module):
    module, told = module
    module.table = {"a": {}}
    module.table["a"][2] = 3
    assert len(told) == 2
