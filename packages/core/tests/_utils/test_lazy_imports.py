import importlib

import pytest


@pytest.mark.parametrize(
    ("package", "name", "home"),
    [
        ("tokenmix_core.nn", "RMSNorm", "tokenmix_core.nn.norm.RMSNorm"),
        ("tokenmix_core.ops", "SSD_HEAD_SIZES", "tokenmix_core.ops.ssd.api.HEAD_SIZES"),
        ("tokenmix_core.ops", "ssd_autograd", "tokenmix_core.ops.ssd.autograd"),
    ],
)
def test_a_lazy_name_is_that_of_its_module(package, name, home):
    found = getattr(importlib.import_module(package), name)
    module, _, attribute = home.rpartition(".")
    assert found is getattr(importlib.import_module(module), attribute)


def test_a_name_that_is_not_listed_is_refused():
    nn = importlib.import_module("tokenmix_core.nn")
    with pytest.raises(AttributeError, match=r"module 'tokenmix_core.nn' has no attribute 'no_such'"):
        nn.no_such  # noqa: B018
