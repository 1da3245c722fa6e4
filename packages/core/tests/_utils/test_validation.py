"""A value of another kind than its annotation says is refused by name, in every configuration and recipe."""

import dataclasses
import inspect
from typing import Any, Literal

import pytest

from tokenmix_core._utils.validation import check_value, described
from tokenmix_core.evaluation.options import EvalOptions
from tokenmix_core.modeling import HybridConfig, find_mixer
from tokenmix_core.training.recipe import DataRecipe, OptimizerRecipe, RunRecipe, Tokens

ALLOWED = [
    (int, 3),
    (Tokens, 3),
    (float, 3),
    (float, 0.5),
    (bool, False),
    (str, "x"),
    (int | None, None),
    (Literal["a", "b"] | None, "b"),
    (list[float], [1, 2.5]),
    (tuple[int, ...], (1, 2)),
    (dict[str, dict[str, Any]], {"a": {"b": object()}}),
    (int | str | list[int | str], ["full", 3]),
]
REFUSED = [
    (int, True, "x must be an integer, got True"),
    (int, 2.0, "x must be an integer, got 2.0"),
    (Tokens, "3", "x must be an integer, got '3'"),
    (float, float("nan"), "x must be a number, got nan"),
    (float, False, "x must be a number, got False"),
    (bool, 1, "x must be True or False, got 1"),
    (str | None, 3, "x must be a string or None, got 3"),
    (Literal["a", "b"], "c", "x must be one of 'a', 'b', got 'c'"),
    (list[int], "12", "x must be a list whose items are each an integer, got '12'"),
    (list[int], [1, None], r"x must be a list whose items are each an integer, got \[1, None\]"),
    (dict[str, Any], [1], r"x must be a dictionary, got \[1\]"),
    (dict[str, dict[str, Any]], {"a": 1}, "x must be a dictionary whose values are each a dictionary, got {'a': 1}"),
]


@pytest.mark.parametrize(("kind", "value"), ALLOWED)
def test_a_value_that_its_annotation_allows_passes(kind, value):
    check_value("x", value, kind)


@pytest.mark.parametrize(("kind", "value", "said"), REFUSED)
def test_another_is_refused_with_what_was_expected(kind, value, said):
    with pytest.raises(ValueError, match=said):
        check_value("x", value, kind)


@pytest.mark.parametrize("cls", [HybridConfig, DataRecipe, OptimizerRecipe, RunRecipe, EvalOptions])
def test_every_field_refuses_what_it_cannot_hold(cls):
    for field in dataclasses.fields(cls):
        if field.name in inspect.get_annotations(cls):
            with pytest.raises(ValueError, match=f"^{field.name} must be"):
                cls(**{field.name: object()})


@pytest.mark.parametrize("mixer", ["attention", "gated_delta_net", "mamba2"])
def test_every_option_of_a_mixer_refuses_what_it_cannot_hold(mixer):
    known = set(inspect.signature(find_mixer(mixer).__init__).parameters) - {"self", "hidden_size", "norm_eps"}
    for option in known:
        with pytest.raises(ValueError, match=rf"^mixer_options\['{mixer}'\]: {option} must be"):
            HybridConfig(mixers=[mixer], mixer_options={mixer: {option: object()}})


class Parent:
    """Is a class.

    Args:
        width: of the
            box: inside.
        low, high: its ends.

    Raises:
        ValueError: never.
    """


class Child(Parent):
    """Is another. Note: this is none.

    Attributes:
        high: told anew.
    """


def test_descriptions_are_those_of_the_docstrings_the_class_before_its_bases():
    assert described(Parent) == {"width": "of the box: inside.", "low": "its ends.", "high": "its ends."}
    assert described(Child) == {**described(Parent), "high": "told anew."}
    assert described(int) == {}


@pytest.mark.parametrize("cls", [DataRecipe, OptimizerRecipe, RunRecipe, EvalOptions, HybridConfig])
def test_every_field_is_described(cls):
    own = inspect.get_annotations(cls, eval_str=True)
    names = [name for name, kind in own.items() if "ClassVar" not in str(kind)]
    assert set(names) <= described(cls).keys()
