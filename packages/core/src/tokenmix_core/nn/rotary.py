"""Rotary position embedding (Su et al. 2024), with the frequency scalings of transformers' `rope_parameters`."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tokenmix_core.nn.dtypes import KeepsFloat32
from tokenmix_core.nn.init import is_loaded
from tokenmix_core.nn.norm import RMSNorm
from tokenmix_core.nn.plain import is_plain
from tokenmix_core.ops import rotate, rotate_step

# required and optional parameters of each rope_type, besides rope_type and rope_theta
_REQUIRED: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}
_ORIGINAL = "original_max_position_embeddings"
_OPTIONAL: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": (),
    "llama3": (_ORIGINAL,),
    "yarn": (_ORIGINAL, "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
}
ROPE_TYPES = tuple(_REQUIRED)


def check_rope(rope_parameters: dict[str, Any]) -> None:
    """Raise a ValueError for invalid rotary parameters, with the invalid value and the valid ones in its message."""
    # older configurations use the key "type"
    kind = rope_parameters.get("rope_type", rope_parameters.get("type", "default"))
    if kind not in ROPE_TYPES:
        raise ValueError(f"rope_parameters: rope_type must be one of {', '.join(ROPE_TYPES)}, got {kind!r}")
    names = ("rope_theta", *_REQUIRED[kind], *_OPTIONAL[kind])
    # transformers writes this field if it rotates only some channels of each head
    if rope_parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(
            f"rope_parameters: whole heads are rotated, got partial_rotary_factor="
            f"{rope_parameters['partial_rotary_factor']!r}"
        )
    if unknown := sorted(set(rope_parameters) - {"rope_type", "type", "partial_rotary_factor", *names}):
        raise ValueError(
            f"rope_parameters: rope_type {kind!r} has no {', '.join(map(repr, unknown))}; it has {', '.join(names)}"
        )
    if missing := [name for name in _REQUIRED[kind] if rope_parameters.get(name) is None]:
        raise ValueError(f"rope_parameters: rope_type {kind!r} needs {', '.join(missing)}")
    for name in names:
        value = rope_parameters.get(name)
        if name == "truncate":
            valid, expected = value is None or isinstance(value, bool), "True or False"
        else:
            number = isinstance(value, int | float) and not isinstance(value, bool)
            valid, expected = value is None or (number and math.isfinite(value) and value > 0), "a positive number"
        if not valid:
            raise ValueError(f"rope_parameters: {name} must be {expected}, got {value!r}")
    for low, high in (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast")):
        a, b = rope_parameters.get(low), rope_parameters.get(high)
        if a is not None and b is not None and a >= b:
            raise ValueError(f"rope_parameters: {low} must be below {high}, got {a} and {b}")


class Rotation(NamedTuple):
    """Cosines and sines of each token's angles, float32 `[B or 1, T, dim / 2]`.

    Both include the factor that `rope_frequencies` returns.
    """

    cos: Tensor
    sin: Tensor


def rope_frequencies(
    dim: int, rope_parameters: dict[str, Any], max_position_embeddings: int
) -> tuple[Float[Tensor, "half"], float]:
    """Return the angle per position, in radians, of each channel pair, and the factor on all cosines and sines.

    Args:
        dim: rotated channels of a head, even.
        rope_parameters: in transformers' convention: `rope_type` (one of `ROPE_TYPES`), `rope_theta`, and the
            parameters of this type.
        max_position_embeddings: context length that the model was trained for.

    Raises:
        ValueError: an odd dim, or parameters that `check_rope` refuses.
    """
    check_rope(rope_parameters)
    kind = rope_parameters.get("rope_type", "default")
    if dim < 2 or dim % 2:
        raise ValueError(f"rotary embedding: the head size must be even and positive, got {dim}")
    theta = float(rope_parameters.get("rope_theta", 10_000.0))
    if kind == "default":
        return 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim), 1.0
    # transformers implements all other scalings, and reads their parameters from a configuration object
    from transformers import PreTrainedConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = PreTrainedConfig()
    config.rope_parameters = {"rope_theta": theta, **rope_parameters}
    config.head_dim, config.hidden_size, config.num_attention_heads = dim, dim, 1
    config.max_position_embeddings = max_position_embeddings
    # compute on the CPU, even if the model is built on the meta device, whose tensors have no values
    with torch.device("cpu"):
        frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    return frequencies.float(), float(factor)


class RotaryEmbedding(KeepsFloat32):
    """Compute the cosines and sines of positions: `rotation = RotaryEmbedding(64, {"rope_theta": 1e4})(position_ids)`.

    Args:
        dim: rotated channels of a head.
        rope_parameters: as for `rope_frequencies`.
        max_position_embeddings: context length that the model was trained for.
    """

    float32 = ("inv_freq",)
    inv_freq: Tensor

    def __init__(self, dim: int, rope_parameters: dict[str, Any], max_position_embeddings: int = 2048):
        super().__init__()
        self.args = (dim, dict(rope_parameters), max_position_embeddings)
        frequencies, self.factor = rope_frequencies(*self.args)
        self.register_buffer("inv_freq", torch.empty(dim // 2, dtype=torch.float32), persistent=False)
        if not self.inv_freq.is_meta:
            self.inv_freq.copy_(frequencies)

    @torch.no_grad()
    def init_weights_(self) -> None:
        if not is_loaded(self.inv_freq):
            self.inv_freq.copy_(rope_frequencies(*self.args)[0])

    @torch.no_grad()
    def forward(self, position_ids: Int[Tensor, "B T"]) -> Rotation:
        # disable autocast: in bfloat16 angles would be wrong by whole revolutions
        with torch.autocast(position_ids.device.type, enabled=False):
            angles = position_ids.unsqueeze(-1).float() * self.inv_freq.float()
            return Rotation(angles.cos() * self.factor, angles.sin() * self.factor)


def apply_rotary(
    x: Float[Tensor, "B T H K"], rotation: Rotation, norm: RMSNorm | None = None
) -> Float[Tensor, "B T H K"]:
    """Rotate channels i and i + K/2 of every head by the token's angles; if given, `norm` normalises each head before.

    Computes in float32 and returns x's dtype.
    """
    if norm is None or not is_plain(RMSNorm, norm):
        return rotate(x if norm is None else norm(x), *rotation)
    return rotate(x, *rotation, norm.weight, eps=norm.eps)


def normed_for_step(q: Tensor, k: Tensor, q_norm: RMSNorm, k_norm: RMSNorm) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Return q, k and arguments by which `rotate_step` norms them; if a norm is not plain, q and k are normed here."""
    if not is_plain(RMSNorm, q_norm, k_norm):
        return q_norm(q), k_norm(k), {}
    return q, k, {"q_weight": q_norm.weight, "k_weight": k_norm.weight, "eps": q_norm.eps}


def apply_rotary_to_both(
    q: Float[Tensor, "B T HQ K"], k: Float[Tensor, "B T H K"], rotation: Rotation
) -> tuple[Tensor, Tensor]:
    """Apply `apply_rotary` to q and k; without gradients, one token of each sequence takes a single kernel."""
    # under torch.compile no branch may depend on the number of tokens: each outcome would become a graph of its
    # own
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or q.shape[1] != 1 or q.dtype != k.dtype:
        return apply_rotary(q, rotation), apply_rotary(k, rotation)
    rotated = torch.empty_like(k, memory_format=torch.contiguous_format)
    q, k, cos, sin = (x.squeeze(1) for x in (q, k, *rotation))
    return rotate_step(q, k, None, cos, sin, rotated, None, None).unsqueeze(1), rotated
