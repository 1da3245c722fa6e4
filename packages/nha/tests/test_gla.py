"""The contract of the mixer of gated linear attention."""

from typing import ClassVar

import pytest

from tokenmix_core.testing.mixers import MixerContract
from tokenmix_nha.gla import GatedLinearAttention


class TestMixer(MixerContract):
    cases: ClassVar = {
        "gla": lambda: GatedLinearAttention(32, num_heads=2),
        "wide": lambda: GatedLinearAttention(32, num_heads=4, expand_k=1.0, expand_v=2.0, gate_normalizer=1.0),
    }


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="must divide"):
        GatedLinearAttention(32, num_heads=3)
    with pytest.raises(ValueError, match="gate_normalizer"):
        GatedLinearAttention(32, gate_normalizer=0)
