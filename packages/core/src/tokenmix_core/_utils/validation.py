"""Check values against annotations of fields or arguments, and read the descriptions of these from docstrings."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Mapping
from types import NoneType, UnionType
from typing import Any, ClassVar, Literal, Union, get_args, get_origin

_NAMES = {int: "an integer", float: "a number", bool: "True or False", str: "a string", NoneType: "None"}


def check_fields(owner: object, base: type) -> None:
    """Check the values of those fields of an object that `base` and its subclasses declare.

    Raises:
        ValueError: a value does not match its annotation; the message has both.
    """
    for cls in type(owner).__mro__:
        if issubclass(cls, base):
            for name, kind in inspect.get_annotations(cls, eval_str=True).items():
                if get_origin(kind) is not ClassVar:
                    check_value(name, getattr(owner, name), kind)


def check_arguments(function: Callable[..., Any], arguments: Mapping[str, Any], label: str) -> None:
    """Check a function's arguments against its annotations; in error messages, `label` precedes their names.

    Raises:
        ValueError: a value does not match its annotation; the message has both.
    """
    kinds = inspect.get_annotations(function, eval_str=True)
    for name, value in arguments.items():
        check_value(label + name, value, kinds.get(name, Any))


def check_value(name: str, value: Any, kind: Any) -> None:
    """Raise a ValueError unless `value` matches the annotation `kind`; floats must be finite."""
    if not _fits(value, kind):
        raise ValueError(f"{name} must be {_shown(kind)}, got {value!r}")


def described(cls: type) -> dict[str, str]:
    """Return descriptions of a class's attributes or arguments by name, from its docstring and those of its bases."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        text = inspect.cleandoc(base.__doc__ or "") + "\n"
        for section in re.findall(r"^(?:Args|Attributes):\n((?: {4}.*\n|\n)+)", text, re.MULTILINE):
            for names, said in re.findall(r"^ {4}(\w+(?:, \w+)*): (.*\n(?: {8}.*\n)*)", section, re.MULTILINE):
                found |= dict.fromkeys(names.split(", "), " ".join(said.split()))
    return found


def _fits(value: Any, kind: Any) -> bool:
    origin, args = get_origin(kind), get_args(kind)
    if kind is Any:
        return True
    if origin in (Union, UnionType):
        return any(_fits(value, choice) for choice in args)
    if origin is Literal:
        return any(value == choice and type(value) is type(choice) for choice in args)
    if origin in (list, tuple):
        return isinstance(value, list | tuple) and all(_fits(x, args[0]) for x in value)
    if origin is dict:
        return isinstance(value, dict) and all(_fits(k, args[0]) and _fits(v, args[1]) for k, v in value.items())
    if kind is None or kind is NoneType:
        return value is None
    if kind is bool or isinstance(value, bool):
        return kind is bool and isinstance(value, bool)
    if kind is float:
        return isinstance(value, int | float) and math.isfinite(value)
    return isinstance(value, int if issubclass(kind, int) else kind)


def _shown(kind: Any) -> str:
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return " or ".join(map(_shown, args))
    if origin is Literal:
        return f"one of {', '.join(map(repr, args))}"
    if origin in (list, tuple):
        return f"a list whose items are each {_shown(args[0])}"
    if origin is dict:
        return "a dictionary" if args[1] is Any else f"a dictionary whose values are each {_shown(args[1])}"
    if kind is Any:
        return "anything"
    return _NAMES.get(kind) or next((_NAMES[known] for known in _NAMES if issubclass(kind, known)), kind.__name__)


def undefined(instance: object, member: str, purpose: str) -> ValueError:
    """Return the error for a subclass without `member`; its message says what to define and for which purpose."""
    return ValueError(f"{type(instance).__qualname__} must define {member}, {purpose}")
