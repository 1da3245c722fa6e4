"""Registry of token mixers by the names that configurations use."""

from __future__ import annotations

import importlib

from tokenmix_core._utils.auto_registration import MIXERS as ANNOUNCED
from tokenmix_core.nn.attention import Attention
from tokenmix_core.nn.gated_delta_net import GatedDeltaNet
from tokenmix_core.nn.mamba2 import Mamba2
from tokenmix_core.nn.mixer import Mixer

_MIXERS: dict[str, type[Mixer]] = {"attention": Attention, "gated_delta_net": GatedDeltaNet, "mamba2": Mamba2}


def register_mixer(name: str, mixer: type[Mixer]) -> None:
    """Register a mixer under the name that configurations use; packages call this at import.

    Raises:
        ValueError: `mixer` is no subclass of Mixer, or the name belongs to another class.
    """
    if not (isinstance(mixer, type) and issubclass(mixer, Mixer)):
        raise ValueError(f"register_mixer: expected a subclass of Mixer for {name!r}, got {mixer!r}")
    if _MIXERS.setdefault(name, mixer) is not mixer:
        raise ValueError(f"register_mixer: {name!r} is already {_MIXERS[name].__qualname__}")


def known_mixers() -> list[str]:
    """Return the names of all mixers: the registered ones, and those of installed packages not yet imported."""
    return sorted({*_MIXERS, *ANNOUNCED})


def find_mixer(name: str) -> type[Mixer]:
    """Return the mixer registered under a name; import the installed package that registers it, if necessary.

    Raises:
        ValueError: an unknown name.
    """
    if name not in _MIXERS and name in ANNOUNCED:
        importlib.import_module(ANNOUNCED[name])
    if name not in _MIXERS:
        raise ValueError(
            f"unknown mixer type {name!r}; known are {', '.join(known_mixers())}; "
            "import the package that registers it first"
        )
    return _MIXERS[name]
