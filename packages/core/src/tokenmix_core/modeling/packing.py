"""Convert a call's padding mask, document boundaries and positions to one token layout."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from tokenmix_core.chunking import packed_positions
from tokenmix_core.modeling.cache import HybridCache
from tokenmix_core.modeling.cache_name import name_of
from tokenmix_core.modeling.rollback import Tokens
from tokenmix_core.nn.state import Span

# names of the arguments for boundaries that transformers' DataCollatorWithFlattening adds to position_ids
_BOUNDARIES = ("cu_seq_lens_q", "cu_seq_lens_k")
_LONGEST = ("max_length_q", "max_length_k")
_INDEX = "seq_idx"


class Call(NamedTuple):
    """Token layout, cache, boundaries and positions of a forward call.

    Attributes:
        span: token layout.
        cache: the cache that the call updates; None without one.
        document_cu_seqlens: boundaries of packed documents, from whichever argument of the call gave them.
        position_ids: `[B or 1, T]`, in the layout of the layers.
    """

    span: Span
    cache: HybridCache | None
    document_cu_seqlens: Int[Tensor, "N_plus_1"] | None
    position_ids: Int[Tensor, "_ T"]

    @property
    def cu_seqlens(self) -> Int[Tensor, "N_plus_1"] | None:
        """Boundaries of the layers' input: those of documents, or of rows from which padding is removed."""
        return self.span.cu_seqlens if self.document_cu_seqlens is None else self.document_cu_seqlens


def begin_call(
    model: Any,
    hidden: Tensor,
    named: dict[str, Any],
    *,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    cu_seqlens: Tensor | None,
    cache: HybridCache | None,
    use_cache: bool | None,
) -> Call:
    """Determine cache, token layout and boundaries of a backbone's call; the caller must later call `cache.end()`.

    Args:
        model: the backbone; its `config`, `make_cache` and `gradient_checkpointing` are used.
        hidden: the embeddings `[B, T, D]`.
        named: the call's other inputs; transformers' arguments for boundaries are removed from this dictionary.
        attention_mask, position_ids, cu_seqlens, cache, use_cache: as for `HybridModel.forward`.

    Raises:
        ValueError: inputs that do not fit together.
    """
    batch, tokens = hidden.shape[:2]
    recomputes = model.training and model.gradient_checkpointing
    check_cache(cache)
    if recomputes and cache is not None:
        # gradient checkpointing runs each layer twice, which would update its state twice
        raise ValueError("a cache and gradient checkpointing exclude each other: call model.eval() to generate")
    cached = cache is not None or (bool(use_cache) and not recomputes)
    cu_seqlens = document_cu_seqlens(
        cu_seqlens, position_ids, attention_mask, named, batch=batch, tokens=tokens, cached=cached
    )
    if use_cache is None:
        # in a compiled graph with padding, a cache is kept only on request
        traced = attention_mask is not None and torch.compiler.is_compiling()
        use_cache = model.config.use_cache and not model.training and cu_seqlens is None and not traced
    # a given cache is updated regardless of use_cache, as in transformers' models
    if cache is None and use_cache and not recomputes:
        cache = model.make_cache()
    if cache is not None and cu_seqlens is not None:
        raise ValueError("cu_seqlens and a cache exclude each other; pass use_cache=False, or rows with padding")
    mask = real_tokens(attention_mask, batch, tokens, cache)
    if cache is None:
        span = Span(batch, tokens, hidden.device, mask=mask, fixed=torch.compiler.is_compiling(), stateless=True)
        if mask is not None and not span.aligned and not len(span.index):
            span = span.with_dummy()
    else:
        span = cache.begin(batch, tokens, hidden.device, mask)
    return Call(span, cache, cu_seqlens, token_positions(position_ids, span, cu_seqlens, cache))


def rolls_back(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a backbone's `forward` for caches with a history, which stores the inputs of each call.

    The call first computes pending tokens: those that `crop` has kept and whose states it has dropped.
    """
    name = name_of(forward)
    names = list(inspect.signature(forward).parameters)[1:]
    at = names.index(name)

    @functools.wraps(forward)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        cache = args[at] if len(args) > at else kwargs.get(name)
        history = getattr(cache, "history", None)
        if history is None:
            return forward(self, *args, **kwargs)
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        x = given.get("input_ids") if given.get("inputs_embeds") is None else given["inputs_embeds"]
        if not isinstance(x, Tensor) or given.get("cu_seqlens") is not None:
            # invalid arguments: `forward` itself raises the error
            return forward(self, *args, **kwargs)
        mask = real_tokens(given.pop("attention_mask", None), len(x), x.shape[1], cache)
        takers = getattr(self, "input_takers", {})
        extra = {key: given.pop(key) for key in list(given) if key in takers}
        positions = given.pop("position_ids", None)
        if positions is not None and positions.shape[:1] == (1,):
            positions = positions.expand(len(x), -1)
        given = {key: value for key, value in given.items() if key not in ("input_ids", "inputs_embeds")}
        extra = self.inputs_to_keep(extra, cache) if takers else extra
        return history.call(functools.partial(forward, self), cache, Tokens(x, mask, positions, extra), given)

    return call


def check_cache(cache: Any) -> None:
    """Raise a ValueError for a cache of another library."""
    if cache is not None and not isinstance(cache, HybridCache):
        raise ValueError(
            f"cache (past_key_values) must be a HybridCache (model.make_cache()), got {type(cache).__name__}, "
            "which cannot hold the states of all mixers; peft's prefix tuning makes such a cache and is not available: "
            "use LoRA or prompt tuning"
        )


def document_cu_seqlens(
    cu_seqlens: Int[Tensor, "N_plus_1"] | None,
    position_ids: Int[Tensor, "B T"] | None,
    mask: Tensor | None,
    named: dict[str, Any],
    *,
    batch: int,
    tokens: int,
    cached: bool,
) -> Int[Tensor, "N_plus_1"] | None:
    """Return the boundaries of a call's documents, from whichever argument gives them; None for one document per row.

    Given boundaries are not checked. Boundaries from `seq_idx` or from positions are computed on the device; the host
    waits for their number once per call (transformers' models wait in each layer).

    Args:
        cu_seqlens: boundaries `[N + 1]`.
        position_ids: positions; in a single row without a cache, a document begins where they do not increase.
        mask: the call's attention mask.
        named: the call's other inputs; these arguments of transformers are removed from this dictionary:
            `cu_seq_lens_q`, `cu_seq_lens_k`, `max_length_q`, `max_length_k`, `seq_idx`.
        batch, tokens: B and T.
        cached: whether the caller asked for a cache.

    Raises:
        ValueError: arguments that give different boundaries, or that contradict the rest of the call.
    """
    for name in _LONGEST:
        named.pop(name, None)
    given, index = [], named.pop(_INDEX, None)
    for name in _BOUNDARIES:
        if (x := named.pop(name, None)) is not None:
            given.append(_tensor(name, x))
    if given and cu_seqlens is not None:
        raise ValueError("cu_seqlens and cu_seq_lens_q are two names of one argument: give one of them")
    if len(given) == 2 and not _agree(*given):
        raise ValueError(
            "cu_seq_lens_q and cu_seq_lens_k must be the same boundaries, as queries and keys are of the same tokens; "
            f"got {given[0].tolist()[:8]} and {given[1].tolist()[:8]}"
        )
    if given:
        cu_seqlens = given[0]
    if cu_seqlens is not None:
        if mask is not None:
            raise ValueError("cu_seqlens and attention_mask exclude each other: a packed batch has no padding")
        if batch != 1:
            raise ValueError(f"packed documents lie in one row (B = 1), got B = {batch} together with their boundaries")
        return cu_seqlens
    if index is not None:
        index = _tensor(_INDEX, index)
        if batch != 1 or cached or mask is not None:
            raise ValueError(f"seq_idx goes with one row (B = 1), without a cache and attention_mask, got B = {batch}")
        if index.shape != (batch, tokens):
            raise ValueError(f"seq_idx must have shape [B, T] = {[batch, tokens]}, got {list(index.shape)}")
        return cu_seqlens_where(index[0, 1:] != index[0, :-1], tokens)
    if position_ids is None or batch != 1 or cached or tokens == 1 or position_ids.shape != (1, tokens):
        return None
    if mask is not None and (torch.compiler.is_compiling() or not bool(mask.all())):
        return None
    return cu_seqlens_where(position_ids[0, 1:] <= position_ids[0, :-1], tokens)


def real_tokens(mask: Tensor | None, batch: int, tokens: int, cache: HybridCache | None) -> Bool[Tensor, "B T"] | None:
    """Return a mask of the call's real tokens; None if all are real.

    A single token after cached ones is assumed to be real unless those may end in padding.
    """
    past = 0 if cache is None else cache.get_seq_length()
    if mask is not None and not isinstance(mask, Tensor):
        raise ValueError(f"attention_mask must be a tensor, got {type(mask).__name__}")
    if mask is None:
        return None
    # compare separately: torch 2.11 does not find a symbolic length in a tuple
    fits = mask.dim() == 2 and mask.shape[0] == batch
    if not fits or (mask.shape[1] != tokens and mask.shape[1] != past + tokens):
        raise ValueError(
            f"attention_mask must have shape [B, T] = {[batch, tokens]}"
            f"{f' or [B, past + T] = {[batch, past + tokens]}' if past else ''}, got {list(mask.shape)}"
        )
    tracing = torch.compiler.is_compiling()
    if tokens == 1 and past > 0 and cache is not None:
        # in a compiled graph the host cannot read the flag from the device
        unsure = cache.padding_at_end is not False if tracing else cache.ends_in_padding()
        if not unsure:
            return None
    real = mask[:, -tokens:].bool()
    return real if tracing or not bool(real.all()) else None


def token_positions(
    position_ids: Tensor | None, span: Span, cu_seqlens: Tensor | None, cache: HybridCache | None
) -> Tensor:
    """Return the tokens' positions `[B or 1, T]` in the layout of the layers' input.

    Raises:
        ValueError: positions of another shape, or that restart inside a row without boundaries.
    """
    if position_ids is not None:
        if (
            position_ids.dim() != 2
            or (position_ids.shape[0] != 1 and position_ids.shape[0] != span.batch)
            or position_ids.shape[1] != span.tokens
        ):
            raise ValueError(
                f"position_ids must have shape {[span.batch, span.tokens]} or {[1, span.tokens]}, "
                f"got {list(position_ids.shape)}"
            )
        if cu_seqlens is None:
            _refuse_restarts(position_ids, span, cache is not None)
        return span.pack(position_ids.expand(span.batch, -1)) if span.mask is not None else position_ids
    if cu_seqlens is not None:
        return packed_positions(cu_seqlens, span.tokens).unsqueeze(0)
    if span.uniform:
        return torch.arange(span.past, span.past + span.tokens, device=span.device).unsqueeze(0)
    return span.positions.view(span.layout)


def cu_seqlens_where(begins: Bool[Tensor, "T_minus_1"], tokens: int) -> Int[Tensor, "N_plus_1"] | None:
    """Return the boundaries of documents; `begins[i]` is True if one begins at token i + 1.

    Returns None if `begins` is nowhere True. Waits for the device. Under torch.compile it does neither.
    """
    starts = begins.nonzero().squeeze(1) + 1
    # in a compiled graph the host cannot wait
    if not torch.compiler.is_compiling() and not len(starts):
        return None
    return torch.cat((starts.new_zeros(1), starts, starts.new_full((1,), tokens))).to(torch.int32)


def read_padding_flag(cache: Any) -> None:
    """Read from the device whether a sequence of the cache ends in padding.

    Call this before a compiled step, inside which the host cannot read from the device.
    """
    if isinstance(cache, HybridCache):
        cache.ends_in_padding()


def _refuse_restarts(position_ids: Tensor, span: Span, cached: bool) -> None:
    # `document_cu_seqlens` has checked single rows; a compiled graph cannot check values
    plain = span.batch == 1 and span.mask is None and not cached
    if span.tokens == 1 or plain or torch.compiler.is_compiling():
        return
    fallen = position_ids[:, 1:] <= position_ids[:, :-1]
    if span.mask is not None:
        fallen = fallen & span.mask[:, 1:] & span.mask[:, :-1]
    if bool(fallen.any()):
        raise ValueError(
            "position_ids that restart inside a row are documents, which require one row (B = 1), without a cache "
            f"(use_cache=False) and without padding; got B = {span.batch}{', a cache' if cached else ''}"
            f"{', padding' if span.mask is not None else ''}"
        )


def _tensor(name: str, x: Any) -> Tensor:
    if not isinstance(x, Tensor):
        raise ValueError(f"{name} must be a tensor, got {type(x).__name__}")
    return x


def _agree(a: Tensor, b: Tensor) -> bool:
    # compare values on a CPU only: reading them from a GPU would synchronise
    look = not (a.is_cuda or b.is_cuda or torch.compiler.is_compiling())
    return a.shape == b.shape and (not look or torch.equal(a, b))
