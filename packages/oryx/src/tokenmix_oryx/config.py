"""The configuration: the backbone with Oryx layers, and the modes of calls and of training sequences."""

from __future__ import annotations

from typing import Any

# this import registers the mixer
import tokenmix_oryx.mixer  # noqa: F401
from tokenmix_core.modeling import HybridConfig
from tokenmix_oryx.modes import Assignment, check_mode

# options that older configurations store as fields; `mixer_options` has them now
_OF_LAYERS = (
    "linear_mixer",
    "head_dim",
    "num_heads",
    "conv_size",
    "output_gate",
    "shared_query",
    "grouped_norm",
    "rope",
    "attention_l2_norm",
    "kv_activation",
    "attention_query_activation",
    "linear_query_activation",
    "impl",
)


class OryxConfig(HybridConfig):
    """A `HybridConfig` whose layers are "oryx" by default.

    `mixer_options["oryx"]` has the options of the layers, which `OryxMixer` documents. Layers may also have other
    mixers; modes apply only to Oryx layers.

    Args:
        mode: mode of calls that give none, "attention" or "linear".
        mode_assignment: whether training draws one mode per "chunk" or per "sequence".
        mode_chunk_size: number of tokens in such a chunk.
        attention_probability: probability with which a chunk or sequence is in attention mode.

    Raises:
        ValueError: the reasons of `HybridConfig`, or an invalid mode, size or probability.
    """

    model_type = "tokenmix_oryx"
    default_mixers = ("oryx",)

    mode: str = "attention"
    mode_assignment: Assignment = "chunk"
    mode_chunk_size: int = 128
    attention_probability: float = 0.25

    def __post_init__(self, **kwargs: Any):
        self.check_fields()
        if self.mode_chunk_size < 1 or not 0 <= self.attention_probability <= 1:
            raise ValueError(
                "mode_chunk_size must be at least 1 and attention_probability from 0 to 1, "
                f"got {self.mode_chunk_size!r} and {self.attention_probability!r}"
            )
        check_mode(self.mode)
        super().__post_init__(**kwargs)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any):
        """Call `HybridConfig.from_dict`; convert an older configuration, which stores the layers' options as fields."""
        old = {name: config_dict[name] for name in _OF_LAYERS if name in config_dict}
        if old:
            rest = {name: value for name, value in config_dict.items() if name not in old}
            options = rest.get("mixer_options") or {}
            config_dict = rest | {"mixer_options": {**options, "oryx": old | options.get("oryx", {})}}
        return super().from_dict(config_dict, **kwargs)
