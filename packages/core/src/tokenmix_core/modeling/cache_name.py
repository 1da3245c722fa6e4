"""The name of the cache in transformers' calls and outputs: `cache` from version 5.24 on, `past_key_values` before.

Our models accept either name in every call and provide both in every output, with all versions of transformers. In
calls of transformers' own functions, the constant `CACHE` is the name.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from transformers.utils.generic import ModelOutput

NAMES = ("cache", "past_key_values")
# prefer the new name: versions whose outputs have it also accept the old name
CACHE = NAMES[0] if hasattr(ModelOutput, NAMES[1]) else NAMES[1]


def take_cache(given: dict[str, Any], name: str = CACHE) -> Any:
    """Rename the cache in the keyword arguments `given` to `name` and return it; None if there is no cache.

    Raises:
        ValueError: two different caches under the two names.
    """
    other = NAMES[1] if name == NAMES[0] else NAMES[0]
    cache = given.pop(other, None)
    if cache is not None:
        if given.get(name) not in (None, cache):
            raise ValueError("cache and past_key_values are two names of one argument: give one of them")
        given[name] = cache
    return given.get(name)


def name_of(function: Callable[..., Any]) -> str:
    """Return the name of a function's cache parameter."""
    parameters = inspect.signature(function).parameters
    return next(name for name in NAMES if name in parameters)


def takes_either_name(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a function so that it accepts its cache under either of the two `NAMES`."""
    name = name_of(forward)

    @functools.wraps(forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        take_cache(kwargs, name)
        return forward(*args, **kwargs)

    return call


class _OldNameToo(ModelOutput):
    """Output with both names of the cache, for transformers before 5.24; later versions' outputs have both."""

    @property
    def past_key_values(self) -> Any:
        """The same as `cache`."""
        return self.cache  # type: ignore[attr-defined]

    @past_key_values.setter
    def past_key_values(self, cache: Any) -> None:
        self.cache = cache

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(_new_name(key))

    def __contains__(self, key: Any) -> bool:
        return super().__contains__(_new_name(key))

    def get(self, key: Any, default: Any = None) -> Any:
        """Return the value of a key; either name of the cache works."""
        return super().get(_new_name(key), default)


def _new_name(key: Any) -> Any:
    return NAMES[0] if isinstance(key, str) and key == NAMES[1] else key


_Output: Any = _OldNameToo if CACHE != "cache" else ModelOutput


class CacheOutput(_Output):
    """Model output whose field `cache` is also available as `past_key_values`."""
