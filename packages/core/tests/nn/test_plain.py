"""Test the list of a model's modules."""

from torch import nn

from tokenmix_core.nn.plain import modules_of


def test_modules_come_once_in_the_order_of_torch():
    shared = nn.Linear(2, 2)
    model = nn.Sequential(nn.Sequential(shared, nn.ReLU()), nn.ModuleDict({"a": shared, "b": nn.Dropout()}))
    model.add_module("absent", None)
    model[0].add_module("again", shared)
    assert modules_of(model) == list(model.modules())
    assert len(modules_of(model)) == 6
