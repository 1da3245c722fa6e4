"""Separate packed sequences in transformers' hybrid models: attention and recurrent layers both get the boundaries."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Int
from torch import Tensor, nn

from tokenmix_core.chunking import packed_positions
from tokenmix_core.modeling.cache_name import CACHE
from tokenmix_core.modeling.packing import cu_seqlens_where

_BOUNDARIES = ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")
_CACHES = ("cache", "past_key_values", "cache_params")
# models that build their attention mask without positions
_MASKS_WITHOUT_POSITIONS = ("GraniteMoeHybridModel",)


def separating(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a backbone's forward: all its layers then separate packed sequences, whichever argument marks these."""
    names = list(inspect.signature(forward).parameters)[1:]

    @functools.wraps(forward)
    def separated(self: nn.Module, *args: Any, **call: Any) -> Any:
        call.update(zip(names, args, strict=False))
        if isinstance(mask := call.get("attention_mask"), dict) and "attention_mask" in mask:
            call.update(mask)
        return forward(self, **_separate(self, call, attends="position_ids" in names))

    return separated


def handing_on(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the forward of `Mamba2ForCausalLM`, which passes only a mask to its backbone, to pass on boundaries, too.

    They are passed in a dictionary instead of the mask; `separating`, around the backbone's forward, unpacks it.
    """
    names = list(inspect.signature(forward).parameters)[1:]

    @functools.wraps(forward)
    def handed(self: nn.Module, *args: Any, **call: Any) -> Any:
        call.update(zip(names, args, strict=False))
        marks = {name: call.pop(name) for name in (*_BOUNDARIES, "position_ids") if call.get(name) is not None}
        if marks:
            call["attention_mask"] = {"attention_mask": call.get("attention_mask"), **marks}
        return forward(self, **call)

    return handed


def starts_of(seq_idx: Int[Tensor, "B T"], batch: int, tokens: int) -> Bool[Tensor, "B T_minus_1"]:
    """Return for each token, except the first of a row, whether it is the first of a sequence.

    Raises:
        ValueError: `seq_idx` has another shape than `[B, T]`, or `[T]` for one row.
    """
    seq_idx = seq_idx.unsqueeze(0) if seq_idx.dim() == 1 and batch == 1 else seq_idx
    if seq_idx.shape != (batch, tokens):
        raise ValueError(f"seq_idx must have shape [B, T] = {[batch, tokens]}, got {list(seq_idx.shape)}")
    return seq_idx[:, 1:] != seq_idx[:, :-1]


def cu_seqlens_of(starts: Bool[Tensor, "B T_minus_1"]) -> Int[Tensor, "N_plus_1"] | None:
    """Return the boundaries of sequences in the concatenated rows; None if each row is one. Waits for the device."""
    if not bool(starts.any()):
        return None
    begins = F.pad(starts, (1, 0), value=True).flatten()
    return cu_seqlens_where(begins[1:], len(begins))


def _separate(body: nn.Module, call: dict[str, Any], *, attends: bool) -> dict[str, Any]:
    """Add boundaries for recurrences, and positions or a mask for attention, to the call's arguments; return these.

    `call` itself is changed; with several sequences in a row, it then uses no cache.

    `attends`: whether the model has attention layers; without these, positions are dropped.

    Raises:
        ValueError: boundaries that contradict the tokens, or sequences that cannot be separated.
    """
    x = call.get("input_ids") if call.get("input_ids") is not None else call.get("inputs_embeds")
    positions, mask = call.get("position_ids"), call.get("attention_mask")
    if not attends:
        call.pop("position_ids", None)
    if x is None or (positions is None and all(call.get(name) is None for name in _BOUNDARIES)):
        return call
    batch, tokens = x.shape[:2]
    real = mask[:, -tokens:].bool() if isinstance(mask, Tensor) and mask.dim() == 2 else None
    what, cu_seqlens = _boundaries(call, positions, real, batch, tokens)
    if cu_seqlens is None:
        return call
    if call.get("use_cache") or any(call.get(name) is not None for name in _CACHES):
        raise ValueError(f"packed sequences ({what}) exclude a cache: pass use_cache=False")
    if getattr(body.config, "ple_layer_ids", None):
        raise ValueError(f"packed sequences ({what}) exclude n-gram embeddings (ple_layer_ids): run them one by one")
    if real is not None and not bool(real.all()):
        raise ValueError(f"packed sequences ({what}) exclude padding: pass no attention_mask")
    call["use_cache"] = False
    if real is not None:
        mask = call["attention_mask"] = None
    if batch == 1:
        call["cu_seq_lens_q"] = cu_seqlens
    local = packed_positions(cu_seqlens, batch * tokens).view(batch, tokens)
    if batch > 1 and what == "position_ids":
        call["seq_idx"] = (local == 0).cumsum(-1, dtype=torch.int32)
    if attends:
        # keep the three further rows of positions, which are those of images
        spatial = positions[-3:] if positions is not None and positions.dim() == 3 else None
        call["position_ids"] = local if spatial is None else torch.cat((local.unsqueeze(0), spatial))
        if mask is None:
            call |= _for_attention(body, call, x, local, cu_seqlens)
    return call


def _boundaries(
    call: dict[str, Any], positions: Tensor | None, real: Tensor | None, batch: int, tokens: int
) -> tuple[str, Int[Tensor, "N_plus_1"] | None]:
    """Return the name of the argument that marks sequences, and their boundaries (None if each row is one sequence)."""
    cu_seqlens, keys, seq_idx = (call.get(name) for name in _BOUNDARIES)
    starts = None if seq_idx is None else starts_of(seq_idx, batch, tokens)
    if (given := keys if cu_seqlens is None else cu_seqlens) is not None:
        if batch != 1:
            raise ValueError(f"cu_seq_lens_q packs sequences in one row (B = 1), got B = {batch}; pass seq_idx")
        if keys is not None and keys is not given and keys.shape != given.shape:
            raise ValueError("cu_seq_lens_q and cu_seq_lens_k must be the same boundaries")
        return "cu_seq_lens_q", given
    if starts is not None:
        return "seq_idx", cu_seqlens_of(starts)
    assert positions is not None
    text = positions[0] if positions.dim() == 3 and len(positions) == 4 else positions
    if tokens == 1 or text.dim() != 2:
        return "position_ids", None
    starts = (text[:, 1:] <= text[:, :-1]).expand(batch, -1)
    if real is not None:
        starts = starts & real[:, 1:] & real[:, :-1]
    return "position_ids", cu_seqlens_of(starts)


def _for_attention(
    body: nn.Module, call: dict[str, Any], x: Tensor, local: Int[Tensor, "B T"], cu_seqlens: Int[Tensor, "N_plus_1"]
) -> dict[str, Any]:
    """Return arguments that attention needs besides positions; most backbones derive their mask from positions."""
    from transformers import masking_utils

    config: Any = body.config
    name = config._attn_implementation
    if "flash" in name:
        if len(x) > 1:
            raise ValueError(
                f"attn_implementation={name!r} separates packed sequences in one row only (B = 1), got B = {len(x)}; "
                "concatenate the rows, or use 'sdpa'"
            )
        longest = call.get("max_length_q") or int(cu_seqlens.diff().max())
        return {"cu_seq_lens_k": cu_seqlens, "max_length_q": longest, "max_length_k": longest}
    if name not in masking_utils.ALL_MASK_ATTENTION_FUNCTIONS:
        raise ValueError(f"attn_implementation={name!r} takes no mask and cannot separate packed sequences; use 'sdpa'")
    if type(body).__name__ not in _MASKS_WITHOUT_POSITIONS:
        return {}
    # an empty tensor: only shape, dtype and device of the embeddings are read
    like = torch.empty(*local.shape, 0, device=x.device, dtype=next(body.parameters()).dtype)
    full = masking_utils.create_causal_mask(config, like, None, **{CACHE: None}, position_ids=local)  # type: ignore[misc]
    return {"attention_mask": {"full_attention": full, "linear_attention": None}}
