"""The configuration: the family of the linear mixer, the ablations' switches, and how training assigns modes."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

# registers the mixer that configurations name
import tokenmix_oryx.mixer  # noqa: F401
from tokenmix_core.modeling import HybridConfig
from tokenmix_core.ops.common import Impl
from tokenmix_oryx.modes import Assignment, check_mode

MAMBA2, GDN = "mamba2", "gated_delta_net"
# what a family chooses where a field is None (appendix C.2)
FAMILIES: dict[str, dict[str, Any]] = {
    MAMBA2: {
        "grouped_norm": False,
        "rope": "both",
        "kv_activation": "none",
        "attention_query_activation": "none",
        "linear_query_activation": "none",
    },
    GDN: {
        "grouped_norm": True,
        "rope": "attention",
        "kv_activation": "silu",
        "attention_query_activation": "silu",
        "linear_query_activation": "silu",
    },
}
Activation = Literal["silu", "none"]


class OryxConfig(HybridConfig):
    """Sizes and choices of an Oryx model; every layer's mixer is "oryx". Fields of `HybridConfig`, and:

    Args:
        linear_mixer: "mamba2" (ORYX-TM) or "gated_delta_net" (ORYX-TG).
        head_dim: K = V, of both mixers.
        num_heads: heads of queries, keys and values; None for hidden_size / head_dim.
        conv_size: width of the short convolution on keys and values; 0 for none.
        output_gate: multiply with silu(W_g x); without it outputs are only normalised.
        shared_query: one query projection for both mixers.
        grouped_norm: normalise each head on its own rather than the whole width; None for the family's choice.
        rope: rotate the queries and keys of "both" mixers or of "attention" only; None for the family's choice.
        attention_l2_norm: unit length for "none" of attention's inputs, its "key", or "query_key".
        kv_activation: of keys and values after the convolution, "silu" or "none"; None for the family's choice.
        attention_query_activation, linear_query_activation: of the queries; None for the family's choice.
        mode: the mode of calls that name none.
        mode_assignment: in training, a mode for each "chunk" or for a whole "sequence".
        mode_chunk_size: tokens in such a chunk.
        attention_probability: of attention, for each chunk or sequence.
        impl: implementation of the operations, None, "gluon", "triton" or "reference".

    Raises:
        ValueError: an unknown choice, or sizes that do not fit.
    """

    model_type = "tokenmix_oryx"
    mixer_inputs: ClassVar[tuple[str, ...]] = ("mode",)

    linear_mixer: Literal["mamba2", "gated_delta_net"] = MAMBA2
    head_dim: int = 128
    num_heads: int | None = None
    conv_size: int = 4
    output_gate: bool = True
    shared_query: bool = False
    grouped_norm: bool | None = None
    rope: Literal["both", "attention"] | None = None
    attention_l2_norm: Literal["none", "key", "query_key"] = "none"
    kv_activation: Activation | None = None
    attention_query_activation: Activation | None = None
    linear_query_activation: Activation | None = None
    mode: str = "attention"
    mode_assignment: Assignment = "chunk"
    mode_chunk_size: int = 128
    attention_probability: float = 0.25
    impl: Impl | None = None

    def __post_init__(self, **kwargs: Any):
        self.check_fields()
        for name, value in FAMILIES[self.linear_mixer].items():
            if getattr(self, name) is None:
                setattr(self, name, value)
        if self.head_dim < 2 or self.head_dim % 2:
            raise ValueError(f"head_dim must be even and positive, for rotary positions, got {self.head_dim!r}")
        if self.num_heads is None:
            if self.hidden_size % self.head_dim:
                raise ValueError(
                    f"without num_heads, head_dim must divide hidden_size, got {self.head_dim} and {self.hidden_size}"
                )
            self.num_heads = self.hidden_size // self.head_dim
        if self.num_heads < 1:
            raise ValueError(f"num_heads must be at least 1, got {self.num_heads!r}")
        if self.conv_size != 0 and not 2 <= self.conv_size <= 8:
            raise ValueError(f"conv_size must be 0 or lie from 2 to 8, got {self.conv_size!r}")
        if self.mode_chunk_size < 1 or not 0 <= self.attention_probability <= 1:
            raise ValueError(
                "mode_chunk_size must be at least 1 and attention_probability from 0 to 1, "
                f"got {self.mode_chunk_size!r} and {self.attention_probability!r}"
            )
        check_mode(self.mode)
        if self.mixers is None:
            self.mixers = ["oryx"]
        if foreign := sorted(set(self.mixers) - {"oryx"}):
            raise ValueError(f"every layer of an Oryx model is 'oryx', got mixers with {', '.join(map(repr, foreign))}")
        super().__post_init__(**kwargs)
