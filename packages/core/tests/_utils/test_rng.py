"""Test that no two uses of random numbers in the packages share a stream."""

import ast
from collections import Counter
from pathlib import Path

import pytest

from tokenmix_core._utils.rng import stream

PACKAGES = Path(__file__).parents[3]
SOURCES = [path for path in sorted(PACKAGES.glob("*/src/tokenmix_*/**/*.py")) if "testing" not in path.parts]


def _calls(function):
    """Return every call of a function of this name in the packages, with its file."""
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", None)
                if called == function:
                    yield path, node


def _first(*key):
    return tuple(stream(*key).integers(2**63, size=4))


def test_every_use_names_a_stream_of_its_own():
    names = Counter()
    for path, call in _calls("stream"):
        name = call.args[0]
        assert isinstance(name, ast.Constant), f"{path} names its stream by an expression"
        names[name.value] += 1
    assert {"mqar", "mqar rows", "copying", "copy rows", "niah", "niah rows", "mixed rows"} <= set(names)
    assert set(names.values()) == {1}, names
    drawn = {_first(name, *key) for name in names for key in ((), (0,), (0, 3), (3, 0), (0, 3, 0))}
    assert len(drawn) == 5 * len(names)


@pytest.mark.parametrize("function", ["default_rng", "RandomState", "SeedSequence"])
def test_no_use_goes_past_the_names(function):
    assert {path.name for path, _ in _calls(function)} <= {"rng.py"}


def test_keys_of_other_lengths_and_sizes_give_other_numbers():
    # NumPy would give (1, 2) the same stream as (1, 2, 0), and 2**32 the same as (0, 1)
    keys = [(), (0,), (0, 0), (1,), (1, 2), (1, 2, 0), (2, 1), (2**32,), (0, 1), (2**32 + 1,), (12,)]
    assert len({_first("name", *key) for key in keys}) == len(keys)
    assert _first("name", 1, 2) == _first("name", 1, 2)
