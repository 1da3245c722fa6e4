"""Configuration of models with NAtS-L layers."""

from __future__ import annotations

from tokenmix_core.modeling import HybridConfig, register_mixer
from tokenmix_nats_l.mixer import NatsL

register_mixer("nats_l", NatsL)


class NatsLConfig(HybridConfig):
    """`HybridConfig` whose layers are "nats_l" by default.

    Options of the layers are `mixer_options["nats_l"]`, see `NatsL`. Other mixers may interleave.
    """

    model_type = "tokenmix_nats_l"
    default_mixers = ("nats_l",)
