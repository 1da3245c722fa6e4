"""Softmax attention by one of several backends, merging of partial results, and decoding from a KV cache."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tokenmix_core.kernels.launch import compat
from tokenmix_core.kernels.launch.cache.capture import is_plain
from tokenmix_core.kernels.launch.cache.replay import Checked
from tokenmix_core.ops import checks
from tokenmix_core.ops.dispatch import by_reference, row_impl
from tokenmix_core.ops.slots import check_slots, first_axis
from tokenmix_core.ops.softmax_attention import autograd
from tokenmix_core.ops.softmax_attention.backends import (
    IMPLS,
    AttentionImpl,
    by_cudnn,
    choose_impl,
    limit,
)
from tokenmix_core.ops.softmax_attention.cudnn_plans import kernels_before_plan
from tokenmix_core.ops.softmax_attention.plan import GLUON, takes_gluon
from tokenmix_core.ops.softmax_attention.plan import limit as limit_of_gluon
from tokenmix_core.ops.softmax_attention.types import Call, Mask, call_of
from tokenmix_core.ops.types import AttentionOutput, Impl

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def attention(
    q: Float[Tensor, "B TQ HQ K"],
    k: Float[Tensor, "B TK H K"],
    v: Float[Tensor, "B TK H V"],
    *,
    causal: bool = True,
    window: int | None = None,
    sinks: int = 0,
    scale: float | None = None,
    cu_seqlens: Int[Tensor, "N_plus_1"] | None = None,
    impl: AttentionImpl | None = None,
) -> AttentionOutput:
    """Compute softmax attention with grouped heads, differentiable in q, k and v through both outputs.

    Let i be the query's position counted in keys (the last query is at the last key), and S(i) the keys it sees. Head h
    of k and v serves the HQ / H query heads from h · HQ / H on:

        lse_i = log Σ_{j ∈ S(i)} exp(scale · q_i · k_j)
        o_i   = Σ_{j ∈ S(i)} exp(scale · q_i · k_j − lse_i) v_j

    S(i) is all keys of the sequence; with `causal`, keys j ≤ i; with a `window` of w, of these only keys j > i − w and
    the first `sinks` keys. A query that sees no key gets o = 0 and lse = −∞, and passes no gradient.

    Args:
        q, k, v: bfloat16, float16, float32 or float64, all of one dtype. HQ is a multiple of H.
        causal: whether a query sees only keys up to its own position.
        window: number of keys that a query sees, its own included; needs `causal`.
        sinks: number of first keys of its sequence that a query sees besides the window.
        scale: factor of the scores, positive; None: K ** −0.5.
        cu_seqlens: boundaries of the packed sequences, `[N + 1]`, from 0 to at most T, for B = 1 and TQ = TK.
        impl: "gluon" (our kernels for Hopper: bfloat16 or float16, K = V of 64 or 128; portable kernels run those steps
            in which they are faster), "triton" (our portable kernels), "sdpa" (torch's kernels: cuDNN or
            FlashAttention-2), "flash_attn" (FlashAttention-4 if installed, else flash-attn 2), "reference", or None:
            the fastest one here that supports the call (`choose_impl` is the rule; `tokenmix_core.ops.explain` shows
            its result).

    Returns:
        o `[B, TQ, HQ, V]` in the dtype of q; lse `[B, TQ, HQ]`, natural logarithm, float32 (float64 for float64).

    Raises:
        ValueError: a wrong shape, dtype, device or option, or an `impl` that does not support the call.
    """
    mask, scale, impl, plans = _check(q, k, v, cu_seqlens, causal, window, sinks, scale, impl)
    if plans:
        impl = kernels_before_plan(q, k, v, mask) or impl
    x = autograd.Inputs(q=q, k=k, v=v, cu_seqlens=cu_seqlens, **mask._asdict(), scale=scale, impl=impl)
    o, lse = autograd.attention(*x)
    return AttentionOutput(o, lse.transpose(1, 2))


def merge_attention(outputs: Sequence[AttentionOutput], *, impl: Impl | None = None) -> AttentionOutput:
    """Merge attention over disjoint sets of keys into attention over their union, differentiable in every o and lse.

        lse = log Σ_i exp(lse_i)        o = Σ_i exp(lse_i − lse) o_i

    Args:
        outputs: at least one result; all have o `[B, T, HQ, V]` and lse `[B, T, HQ]` of the same sizes. lse is −∞ if a
            query sees no key.
        impl: "triton" (one launch per pair of results, lse in float32), "reference" (any device), or None: Triton for
            CUDA tensors in eager mode. In any case torch's operations run under tracing and transforms, if a gradient
            is wanted, if there is a single result, and if an lse is not float32.

    Raises:
        ValueError: an empty sequence, or shapes, dtypes, devices or an `impl` that do not fit.
    """
    if not outputs:
        raise ValueError("merge_attention: outputs must hold at least one result, got none")
    dims: dict[str, int] = {}
    for i, (o, lse) in enumerate(outputs):
        checks.bind_shapes("merge_attention", dims, **{f"o[{i}]": (o, "B T HQ V"), f"lse[{i}]": (lse, "B T HQ")})
    checks.check_same_device("merge_attention", **{f"o[{i}]": out.o for i, out in enumerate(outputs)})
    checks.check_same_dtype("merge_attention", **{f"o[{i}]": out.o for i, out in enumerate(outputs)})
    learning = torch.is_grad_enabled() and any(x.requires_grad for out in outputs for x in out)
    float32 = all(out.lse.dtype == torch.float32 for out in outputs)
    usable = len(outputs) > 1 and float32 and not learning and outputs[0].o.numel() > 0
    if row_impl("merge_attention", impl, outputs[0].o) == "triton" and usable and not compat.transformed():
        return functools.reduce(lambda a, b: AttentionOutput(*autograd.merge_two(*a, *b)), outputs)
    lses = torch.stack([out.lse for out in outputs])
    top = lses.detach().amax(0)
    top = top.masked_fill(top.isneginf(), 0.0)
    weights = (lses - top).exp()
    total = weights.sum(0)
    blind = total == 0
    total = total.masked_fill(blind, 1.0)
    weights = (weights / total).unsqueeze(-1)
    o = weights[0] * outputs[0].o
    for weight, part in zip(weights[1:], outputs[1:], strict=True):
        o = o + weight * part.o
    return AttentionOutput(o.to(outputs[0].o.dtype), (top + total.log()).masked_fill(blind, float("-inf")))


def attention_decode(
    q: Float[Tensor, "B TQ HQ K"],
    k_cache: Float[Tensor, "B S H K"],
    v_cache: Float[Tensor, "B S H V"],
    cache_seqlens: Int[Tensor, "B"],
    *,
    window: int | None = None,
    sinks: int = 0,
    scale: float | None = None,
    impl: Impl | None = None,
) -> AttentionOutput:
    """Compute causal attention of each sequence's last TQ tokens to its cache, without gradient.

    Sequence b has `cache_seqlens[b]` tokens, the TQ new ones included, at the front of its row of the cache; the rest
    of the row has no influence. The result is `attention` of the queries with those keys.

    Args:
        q: the queries of the newest TQ tokens, few (usually one).
        k_cache, v_cache: caches with a capacity of S tokens, in the dtype of q.
        cache_seqlens: tokens in the cache, int32 or int64, on the device of q; the host never reads it on CUDA.
        window, sinks, scale: as in `attention`.
        impl: "triton" (split over the keys, then merged), "reference", or None: "triton" on CUDA up to heads of 256,
            except for float64, else "reference". There is no Gluon kernel: decoding is bound by reading the cache.

    Returns:
        o `[B, TQ, HQ, V]` and lse `[B, TQ, HQ]`; 0 and −∞ for a query before the first token of its sequence.

    Raises:
        ValueError: a wrong shape, dtype, device or option; on a CPU also a length outside 0 … S.
    """
    mask, scale, impl = _check_decode(q, k_cache, v_cache, cache_seqlens, window, sinks, scale, impl)
    x = autograd.DecodeInputs(
        q=q, k_cache=k_cache, v_cache=v_cache, cache_seqlens=cache_seqlens, window=mask.window, sinks=mask.sinks,
        scale=scale, impl=impl,
    )  # fmt: skip
    return AttentionOutput(*autograd.attention_decode(*x))


def paged_attention_decode(
    q: Float[Tensor, "B TQ HQ K"],
    k_pages: Float[Tensor, "B P page K"],
    v_pages: Float[Tensor, "B P page V"],
    page_table: Int[Tensor, "B H columns"],
    lengths: Int[Tensor, "B H"],
    *,
    slots: Int[Tensor, "B"] | None = None,
    scale: float | None = None,
    impl: Impl | None = None,
) -> AttentionOutput:
    """Compute causal attention of each sequence's last TQ tokens to the pages of each key head, without gradient.

    Key head h of sequence b has `lengths[b, h]` tokens, the TQ new ones included: token j is at offset j mod page of
    page `page_table[b, h, j // page]` of the sequence. All other entries of the table and of the pages have no
    influence. The result is `attention_decode` of each key head with its tokens.

    Args:
        q: the queries of the newest TQ tokens, few (usually one). HQ is a multiple of H.
        k_pages, v_pages: P pages of each sequence, of a multiple of 16 tokens, in the dtype of q.
        page_table: int32, contiguous.
        lengths: int32 or int64, on the device of q; the host never reads it on CUDA.
        slots: int32 `[B]`. `k_pages` and `v_pages` are then pools `[S, P, page, ...]`, and sequence b has the pages of
            slot `slots[b]`. The slots may be any distance apart.
        scale, impl: as in `attention_decode`.

    Returns:
        o `[B, TQ, HQ, V]` and lse `[B, TQ, HQ]`; 0 and −∞ for a query that sees no key.

    Raises:
        ValueError: a wrong shape, dtype, device or option; on a CPU also a length, page or slot that does not exist.
    """
    scale, impl = _check_paged(q, k_pages, v_pages, page_table, lengths, slots, scale, impl)
    x = autograd.PagedDecodeInputs(
        q=q, k_pages=k_pages, v_pages=v_pages, page_table=page_table, lengths=lengths, scale=scale, impl=impl,
        slots=slots,
    )  # fmt: skip
    return AttentionOutput(*autograd.paged_attention_decode(*x))


@Checked
def _check(q, k, v, cu_seqlens, causal, window, sinks, scale, impl) -> tuple[Mask, float, str | None, bool]:
    """Validate a call on whole sequences; return the normalised mask, scale, implementation, and whether cuDNN runs.

    The implementation None means our kernels, in Gluon if Gluon runs. The last value is True if `impl` is None and
    cuDNN was selected for at least one pass.
    """
    op = "attention"
    dims = checks.bind_shapes(op, {}, q=(q, "B TQ HQ K"), k=(k, "B TK H K"), v=(v, "B TK H V"))
    mask, scale = _check_options(op, dims, q, k, v, causal, window, sinks, scale)
    checks.check_packed_queries(op, dims, q, cu_seqlens)
    found = implementation(op, q, k, v, mask, cu_seqlens is not None, impl)
    return mask, scale, found, impl is None and q.is_cuda and by_cudnn(found, q, k, v, mask, cu_seqlens is not None)


def implementation(op: str, q: Tensor, k: Tensor, v: Tensor, mask: Mask, packed: bool, impl: str | None) -> str | None:
    """Return the implementation of a call whose shapes fit; None stands for our kernels, in Gluon if Gluon runs.

    Raises:
        ValueError: an unknown name, or an implementation that does not support the call.
    """
    impl = _resolve(op, impl, call_of(q, k, v, mask, packed, impl is None and takes_gluon(q, k, v)))
    if impl == "gluon" and not torch.compiler.is_compiling():
        GLUON.require(op, q.device, q.dtype, limit_of_gluon(q, k, v))
    return impl


@Checked
def _check_decode(q, k_cache, v_cache, cache_seqlens, window, sinks, scale, impl) -> tuple[Mask, float, str]:
    """Validate a decoding call; return the normalised mask, the scale and the implementation."""
    op = "attention_decode"
    dims = checks.bind_shapes(
        op, {}, q=(q, "B TQ HQ K"), k_cache=(k_cache, "B S H K"), v_cache=(v_cache, "B S H V"),
        cache_seqlens=(cache_seqlens, "B"),
    )  # fmt: skip
    mask, scale = _check_options(op, dims, q, k_cache, v_cache, True, window, sinks, scale)
    checks.check_dtype(op, (torch.int32, torch.int64), cache_seqlens=cache_seqlens)
    # check lengths only if reading them needs no synchronisation; during tracing their values are unknown
    if not cache_seqlens.is_cuda and is_plain(cache_seqlens):
        lengths = cache_seqlens.tolist()
        if any(not 0 <= n <= dims["S"] for n in lengths):
            raise ValueError(f"{op}: cache_seqlens must lie between 0 and S = {dims['S']}, got {lengths[:16]}")
    return mask, scale, _decode_impl(op, q, dims, mask, impl)


@Checked
def _check_paged(q, k_pages, v_pages, page_table, lengths, slots, scale, impl) -> tuple[float, str]:
    """Validate a call of decoding from pages; return the scale and the implementation."""
    op = "paged_attention_decode"
    dims = checks.bind_shapes(
        op, {}, q=(q, "B TQ HQ K"), k_pages=(k_pages, f"{first_axis(slots)} P page K"),
        v_pages=(v_pages, f"{first_axis(slots)} P page V"), page_table=(page_table, "B H columns"),
        lengths=(lengths, "B H"), slots=(slots, "B?"),
    )  # fmt: skip
    S = dims["S"] = dims["columns"] * dims["page"]
    mask, scale = _check_options(op, dims, q, k_pages, v_pages, True, None, 0, scale)
    checks.check_dtype(op, (torch.int32,), page_table=page_table)
    checks.check_dtype(op, (torch.int32, torch.int64), lengths=lengths)
    check_slots(op, slots, len(k_pages))
    if dims["page"] % 16:
        raise ValueError(f"{op}: a page must have a multiple of 16 tokens, got {dims['page']}")
    if not lengths.is_cuda and is_plain(lengths):
        if bool(((lengths < 0) | (lengths > S)).any()):
            raise ValueError(f"{op}: lengths must lie between 0 and {S}, the tokens of {dims['columns']} pages")
        used = torch.arange(0, S, dims["page"]) < lengths.unsqueeze(-1)
        if bool((used & ((page_table < 0) | (page_table >= dims["P"]))).any()):
            raise ValueError(f"{op}: page_table must lie between 0 and {dims['P'] - 1} where a head has tokens")
    return scale, _decode_impl(op, q, dims, mask, impl)


def _decode_impl(op: str, q: Tensor, dims: dict[str, int], mask: Mask, impl: str | None) -> str:
    """Return "triton" or "reference" for a decoding call; raise a ValueError if `impl` does not support the call."""
    call = Call(q.device.type, q.dtype, dims["TQ"], dims["S"], dims["K"], dims["V"], mask)
    if impl is None:
        why = limit("triton", call)
        return "triton" if q.is_cuda and why is None else by_reference(op, why, q.device.type, q.dtype)
    if impl not in ("triton", "reference"):
        raise ValueError(f"{op}: impl must be None, 'triton' or 'reference', got {impl!r}")
    if (why := limit(impl, call)) is not None:
        raise ValueError(f"{op}: impl={impl!r} {why}")
    return impl


def _check_options(op, dims, q, k, v, causal, window, sinks, scale) -> tuple[Mask, float]:
    """Check the options that attention and decoding share; return the normalised mask and the scale."""
    checks.check_dtype(op, _DTYPES, q=q)
    checks.check_same_dtype(op, q=q, k=k, v=v)
    checks.check_multiple(op, "HQ", dims["HQ"], "H", dims["H"])
    if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < 1):
        raise ValueError(f"{op}: window must be None or an integer of at least 1, got {window!r}")
    if window is not None and not causal:
        raise ValueError(f"{op}: a window needs causal=True, got window={window} with causal=False")
    if isinstance(sinks, bool) or not isinstance(sinks, int) or sinks < 0:
        raise ValueError(f"{op}: sinks must be an integer of at least 0, got {sinks!r}")
    factor = dims["K"] ** -0.5 if scale is None else checks.check_scale(op, scale)
    if not factor > 0:
        raise ValueError(f"{op}: scale must be positive, got {scale!r}")
    # normalise the mask: a window of all keys masks nothing, and sinks add nothing without a window
    keys = dims.get("TK", dims.get("S"))
    window = None if window is not None and window >= keys else window
    return Mask(bool(causal), window, 0 if window is None else sinks), factor


def _resolve(op: str, impl: str | None, call: Call) -> str | None:
    if impl is None:
        chosen = choose_impl(call)
        if chosen == "reference":
            by_reference(op, limit("triton", call), call.device, call.dtype)
        return None if chosen == "triton" else chosen
    if impl not in IMPLS:
        raise ValueError(f"{op}: impl must be None or one of {', '.join(map(repr, IMPLS))}, got {impl!r}")
    if (why := limit(impl, call)) is not None:
        raise ValueError(f"{op}: impl={impl!r} {why}")
    return impl
