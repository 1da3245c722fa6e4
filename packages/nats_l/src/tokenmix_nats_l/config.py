"""Configuration of models with NAtS-L layers."""

from __future__ import annotations

from typing import Any

from tokenmix_core.modeling import HybridConfig, register_mixer
from tokenmix_nats_l.mixer import NatsL

register_mixer("nats_l", NatsL)


class NatsLConfig(HybridConfig):
    """`HybridConfig` whose layers are "nats_l" by default.

    Options of the layers are `mixer_options["nats_l"]`, see `NatsL`. Other mixers may interleave.
    """

    model_type = "tokenmix_nats_l"

    def __post_init__(self, **kwargs: Any):
        if self.mixers is None:
            self.mixers = ["nats_l"]
        super().__post_init__(**kwargs)
