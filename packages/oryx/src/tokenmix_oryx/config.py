"""The configuration: the backbone with Oryx layers, and how calls and training assign modes."""

from __future__ import annotations

from typing import Any

# registers the mixer
import tokenmix_oryx.mixer  # noqa: F401
from tokenmix_core.modeling import HybridConfig
from tokenmix_oryx.modes import Assignment, check_mode

# options that old configurations store as fields; they now belong in `mixer_options`
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
    """`HybridConfig` whose layers are "oryx" by default.

    Options of the layers are `mixer_options["oryx"]`, see `OryxMixer`. Other mixers may interleave; modes apply only to
    Oryx layers.

    Args:
        mode: default mode of calls.
        mode_assignment: in training, one mode per "chunk" or per "sequence".
        mode_chunk_size: tokens of a chunk.
        attention_probability: probability of attention for each chunk or sequence.

    Raises:
        ValueError: as for `HybridConfig`, or an invalid mode, size or probability.
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
        """Call `HybridConfig.from_dict`; old configurations store the layers' options as fields and are converted."""
        old = {name: config_dict[name] for name in _OF_LAYERS if name in config_dict}
        if old:
            rest = {name: value for name, value in config_dict.items() if name not in old}
            options = rest.get("mixer_options") or {}
            config_dict = rest | {"mixer_options": {**options, "oryx": old | options.get("oryx", {})}}
        return super().from_dict(config_dict, **kwargs)
