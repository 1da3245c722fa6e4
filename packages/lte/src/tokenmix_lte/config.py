"""The configuration of models with learned token eviction."""

from __future__ import annotations

from tokenmix_core.modeling import HybridConfig, register_mixer
from tokenmix_lte.mixer import Lte
from tokenmix_lte.nsa import Nsa
from tokenmix_lte.tova import Tova

register_mixer("lte", Lte)
register_mixer("nsa", Nsa)
register_mixer("tova", Tova)


class LteConfig(HybridConfig):
    """A `HybridConfig` whose layers are "lte" by default.

    `mixer_options["lte"]` has the options of LTE layers, which `Lte` documents. Layers may also have other mixers.
    """

    model_type = "tokenmix_lte"
    default_mixers = ("lte",)
