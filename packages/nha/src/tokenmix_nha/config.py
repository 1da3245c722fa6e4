"""The configuration: slots, a window for each layer, and the switches of the ablations."""

from __future__ import annotations

from typing import Any

# registers the layer
import tokenmix_nha.mixer  # noqa: F401
from tokenmix_core.modeling import HybridConfig
from tokenmix_core.modeling.config import check_depth
from tokenmix_core.ops.common import Impl
from tokenmix_nha.choices import CHOICES, Fusion, Positions, check_choices
from tokenmix_nha.windows import Window, check_windows


class NhaConfig(HybridConfig):
    """Sizes and choices of an NHA model; every layer's mixer is "nha". Fields of `HybridConfig`, and:

    Args:
        window: of each layer: 0 (slots alone), a number of tokens, or "full"; one for all, or a list whose length
            divides the layers.
        slots: M of every key head; 0 for none.
        num_heads, num_kv_heads, head_dim: as for `NhaMixer`.
        positions: "window" (RoPE in the window alone), "both", "none" or "learned".
        fusion: "softmax", or a "fixed" or "learned" weighted sum of slots and window.
        token_shift: whether a token enters the slots when it leaves the window, not at once.
        long_weight: the weight of the slots in a fixed sum.
        gate_normalizer: divides the gates' logs.
        qk_norm, qkv_bias: norms of q and k, biases of the projections.
        random_windows: windows that training draws from, for every layer and step (Figure 4); None trains with
            `window`.
        impl: implementation of the operations, None, "gluon", "triton" or "reference".

    Raises:
        ValueError: an unknown choice, or sizes that do not fit.
    """

    model_type = "tokenmix_nha"

    window: Window | list[Window] = 32
    slots: int = 64
    num_heads: int = 8
    num_kv_heads: int | None = None
    head_dim: int | None = None
    positions: Positions = "window"
    fusion: Fusion = "softmax"
    token_shift: bool = True
    long_weight: float = 0.5
    gate_normalizer: float = 8.0
    qk_norm: bool = False
    qkv_bias: bool = False
    random_windows: list[Window] | None = None
    impl: Impl | None = None

    def __post_init__(self, **kwargs: Any):
        self.check_fields()
        check_depth(self.num_hidden_layers)
        if self.num_hidden_layers > 0:
            self.window = check_windows(self.window, self.num_hidden_layers, self.slots)
            for window in self.window:
                check_choices(window=window, **{name: getattr(self, name) for name in CHOICES})
        if self.random_windows is not None:
            if not self.random_windows:
                raise ValueError("random_windows must be None or name at least one window, got an empty list")
            check_windows(list(self.random_windows), len(self.random_windows), self.slots)
        if self.mixers is None:
            self.mixers = ["nha"]
        if foreign := sorted(set(self.mixers) - {"nha"}):
            raise ValueError(f"every layer of an NHA model is 'nha', got mixers with {', '.join(map(repr, foreign))}")
        super().__post_init__(**kwargs)
