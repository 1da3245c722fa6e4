"""The configuration of models with NAtS-L layers."""

from __future__ import annotations

from tokenmix_core.modeling import HybridConfig, register_mixer
from tokenmix_nats_l.mixer import NatsL

register_mixer("nats_l", NatsL)


class NatsLConfig(HybridConfig):
    """A `HybridConfig` whose layers are "nats_l" by default.

    `mixer_options["nats_l"]` has the options of the layers, as `NatsLLayer` documents them. Layers may also have other
    mixers.
    """

    model_type = "tokenmix_nats_l"
    default_mixers = ("nats_l",)
