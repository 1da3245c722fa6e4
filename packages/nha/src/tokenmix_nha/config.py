"""The configuration: `HybridConfig` with NHA layers, and the window sizes that training draws at random."""

from __future__ import annotations

from typing import Any

# this import registers the layer
import tokenmix_nha.mixer  # noqa: F401
from tokenmix_core.modeling import HybridConfig
from tokenmix_nha.windows import WINDOW, Window, check_windows, nha_layers

# fields in which configurations stored the options of layers before `mixer_options` existed
_LAYER_FIELDS = (
    "window",
    "slots",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "positions",
    "fusion",
    "token_shift",
    "long_weight",
    "gate_normalizer",
    "qk_norm",
    "qkv_bias",
    "impl",
)


class NhaConfig(HybridConfig):
    """A `HybridConfig` whose `mixers` are "nha" by default.

    `mixer_options` has the options of the layers, which `NhaMixer` documents; `nha_layers` returns the fields for
    layers with different windows. Layers may also have other mixers.

    Args:
        random_windows: window sizes; training draws one of them for each NHA layer and step (Figure 4). None trains
            with the layers' own windows.

    Raises:
        ValueError: the reasons of `HybridConfig`, or `random_windows` is empty or contains an invalid window.
    """

    model_type = "tokenmix_nha"
    default_mixers = ("nha",)

    random_windows: list[Window] | None = None

    def __post_init__(self, **kwargs: Any):
        super().__post_init__(**kwargs)
        if self.random_windows is not None:
            if not self.random_windows:
                raise ValueError("random_windows must be None or name at least one window, got an empty list")
            nha = [self.options_of(i) for i in range(len(self.labels)) if self.mixer_type(i) == "nha"]
            slots = min((options.get("slots", 1) for options in nha), default=1)
            check_windows(self.random_windows, len(self.random_windows), slots)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any):
        """Read a configuration; convert an older one, which stores the layers' options as fields."""
        return super().from_dict(_with_options(config_dict), **kwargs)


def _with_options(fields: dict[str, Any]) -> dict[str, Any]:
    """Move the options of layers from an older configuration's fields to `mixer_options`."""
    old = {name: fields[name] for name in _LAYER_FIELDS if name in fields}
    if not old:
        return fields
    options = old | (fields.get("mixer_options") or {}).get("nha", {})
    rest = {name: value for name, value in fields.items() if name not in old}
    return rest | nha_layers(options.pop("window", WINDOW), **options)
