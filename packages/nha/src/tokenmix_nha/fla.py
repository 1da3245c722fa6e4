"""Gated slot attention and gated linear attention under flash-linear-attention's names and signatures.

    from fla.ops.gsa import chunk_gsa
    from tokenmix_nha.fla import chunk_gsa

As in `tokenmix_core.integrations.fla`, arguments that only tune FLA's kernels are accepted and ignored; arguments that
request a result which this package does not compute raise a ValueError.
"""

from __future__ import annotations

import functools
import warnings
from itertools import pairwise
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tokenmix_core.integrations import (
    Result,
    as_float32,
    as_values,
    refuse_unknown,
    reversed_tokens,
    state_layout,
    tokens_first,
)
from tokenmix_core.nn import at_least_float32
from tokenmix_core.ops import Impl, bind_shapes, check_cu_seqlens, drops_padding
from tokenmix_nha import ops
from tokenmix_nha.ops import SlotWindowState
from tokenmix_nha.ops.gla.api import scanned_at_once
from tokenmix_nha.ops.gla.scan import GatedScan

States = tuple[Tensor | None, Tensor | None]
# a log-gate so low that it clears the state: exp(−10⁴) = 0 in float32
_CLOSED = -1e4


def chunk_gla(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H V"],
    g: Float[Tensor, "B T H K"],
    scale: float | None = None,
    initial_state: Float[Tensor, "N H K V"] | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Int[Tensor, "N_plus_1"] | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    *,
    head_first: bool = False,
    **more: Any,
) -> Result:
    """Compute FLA's `chunk_gla` by `tokenmix_nha.ops.chunk_gla`, which is plain PyTorch.

    Args:
        q, k, v, g, scale, cu_seqlens: the same as for `tokenmix_nha.ops.chunk_gla`.
        initial_state: initial state of any floating-point dtype.
        output_final_state: whether to return the state after each sequence; if False, `final_state` is None.
        state_v_first: whether states are `[N, H, V, K]`.
        head_first: whether q, k, v, g and o are `[B, heads, T, ...]`.
        cu_seqlens_cpu, and the keyword `chunk_size`: accepted and ignored.

    Returns:
        `(o, final_state)`.

    Raises:
        ValueError: an unknown option, or shapes or dtypes that do not fit together.
    """
    return _gla(
        "chunk_gla", q, k, v, g, scale, initial_state, output_final_state, False, state_v_first, cu_seqlens, head_first,
        more,
    )  # fmt: skip


fused_chunk_gla = chunk_gla


def fused_recurrent_gla(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H V"],
    gk: Float[Tensor, "B T H K"] | None = None,
    gv: Float[Tensor, "B T H V"] | None = None,
    scale: float | None = None,
    initial_state: Float[Tensor, "N H K V"] | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Int[Tensor, "N_plus_1"] | None = None,
    *,
    head_first: bool = False,
    **more: Any,
) -> Result:
    """Compute FLA's `fused_recurrent_gla` chunk by chunk, as `chunk_gla` does.

    Args:
        gk: log-gates of the key channels; None for no decay.
        gv: must be None, because this implementation has gates for key channels only.
        reverse: whether to scan each sequence from its last token to its first.

    Other arguments, results and errors are those of `chunk_gla`.
    """
    op = "fused_recurrent_gla"
    if gv is not None:
        raise ValueError(f"{op}: gv is not available: a state decays by the gates of its key channels, gk")
    g = torch.zeros_like(k) if gk is None else gk
    return _gla(
        op, q, k, v, g, scale, initial_state, output_final_state, reverse, state_v_first, cu_seqlens, head_first, more
    )  # fmt: skip


def _gla(
    op, q, k, v, g, scale, initial_state, output_final_state, reverse, state_v_first, cu_seqlens, head_first, more
) -> Result:  # fmt: skip
    state_v_first = state_layout(op, state_v_first, more)
    refuse_unknown(op, more)
    q, k, v, g = tokens_first(head_first, q, k, v, g)
    q, k = as_values(v, q, k)
    boundaries = cu_seqlens
    before = as_float32(initial_state, q, v_first=state_v_first)
    if reverse:
        (q, k, v, g), boundaries, before = reversed_tokens((q, k, v, g), cu_seqlens, before)
    o, after = ops.chunk_gla(q, k, v, g, scale=scale, initial_state=before, cu_seqlens=boundaries)
    if reverse:
        (o,), _, after = reversed_tokens((o,), cu_seqlens, after)
    after = after.mT if state_v_first and after is not None else after
    return o.transpose(1, 2) if head_first else o, after if output_final_state else None


def chunk_gsa(
    q: Float[Tensor, "B T HQ K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H V"],
    s: Float[Tensor, "B T H M"] | None = None,
    g: Float[Tensor, "B T H M"] | None = None,
    scale: float | None = None,
    initial_state: tuple[Tensor, Tensor] | None = None,
    output_final_state: bool = False,
    checkpoint_level: int = 2,
    cu_seqlens: Int[Tensor, "N_plus_1"] | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    *,
    head_first: bool = False,
    impl: Impl | None = None,
    **more: Any,
) -> tuple[Tensor, States]:
    """Compute FLA's `chunk_gsa` by `tokenmix_nha.ops.slot_window_attention` with `window=0`.

    In that operation a token enters the slots with weight 1 − e^g, as in Gated Slot Attention (Zhang et al. 2024, eq.
    9). If g is None (ABC), it is computed from cumulative sums of e^s. If both `s` and g are given, s is compared with
    1 − e^g, which synchronises with the device; if they differ, plain PyTorch runs and warns once.

    Args:
        q, k, v, scale, cu_seqlens, impl: the same as for `tokenmix_nha.ops.slot_window_attention`.
        s: weights of the entering tokens, None for 1 − e^g; if g is None, the logs of ABC's weights. If s equals 1 −
            e^g, it is treated as a function of g and gets no gradient of its own.
        g: log-gates, ≤ 0.
        initial_state: `(hk [N, H, K, M], hv [N, H, M, V])`, of any floating-point dtype.
        output_final_state: whether to return hk and hv after each sequence; if False, both are None.
        head_first: whether q, k, v, s, g and o are `[B, heads, T, ...]`.
        checkpoint_level, cu_seqlens_cpu, and the keyword `chunk_size`: accepted and ignored.

    Returns:
        `(o, final_state)`.

    Raises:
        ValueError: an initial state for ABC, or shapes or dtypes that do not fit together.
    """
    refuse_unknown("chunk_gsa", more)
    return _gsa(
        "chunk_gsa", q, k, v, s, g, scale, initial_state, output_final_state, cu_seqlens, head_first, impl
    )  # fmt: skip


def fused_recurrent_gsa(
    q: Float[Tensor, "B T HQ K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H V"],
    s: Float[Tensor, "B T H M"] | None = None,
    g: Float[Tensor, "B T H M"] | None = None,
    scale: float | None = None,
    initial_state: tuple[Tensor, Tensor] | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    cu_seqlens: Int[Tensor, "N_plus_1"] | None = None,
    *,
    head_first: bool = False,
    impl: Impl | None = None,
) -> tuple[Tensor, States]:
    """Compute FLA's `fused_recurrent_gsa` chunk by chunk, as `chunk_gsa` does.

    With `reverse`, each sequence is scanned from its last token to its first. Other arguments, results and errors are
    those of `chunk_gsa`.
    """
    op = "fused_recurrent_gsa"
    if not reverse:
        return _gsa(op, q, k, v, s, g, scale, initial_state, output_final_state, cu_seqlens, head_first, impl)
    given = tokens_first(head_first, q, k, v, s, g)
    flipped, boundaries, hk = reversed_tokens(
        tuple(x for x in given if x is not None), cu_seqlens, None if initial_state is None else initial_state[0]
    )
    of_name: Any = [None if x is None else flipped.pop(0) for x in given]
    q, k, v, s, g = of_name
    _, _, hv = reversed_tokens((), cu_seqlens, None if initial_state is None else initial_state[1])
    before = None if hk is None or hv is None else (hk, hv)
    o, after = _gsa(op, q, k, v, s, g, scale, before, output_final_state, boundaries, False, impl)
    hk, hv = (reversed_tokens((), cu_seqlens, x)[2] for x in after)
    (o,), _, _ = reversed_tokens((o,), cu_seqlens, None)
    return o.transpose(1, 2) if head_first else o, (hk, hv)


def _gsa(
    op, q, k, v, s, g, scale, initial_state, output_final_state, cu_seqlens, head_first, impl
) -> tuple[Tensor, States]:  # fmt: skip
    q, k, v, s, g = tokens_first(head_first, q, k, v, s, g)
    q, k = as_values(v, q, k)
    dims = bind_shapes(op, {}, q=(q, "B T HQ K"), k=(k, "B T H K"), s=(s, "B T H M?"), g=(g, "B T H M?"))
    sequences = check_cu_seqlens(op, cu_seqlens, dims["B"], dims["T"])
    if g is None:
        if s is None:
            raise ValueError(f"{op}: expected g, or s alone for ABC, got neither")
        if initial_state is not None:
            raise ValueError(
                f"{op}: without g (ABC) there can be no initial_state: the weights already in it are not known"
            )
        g = _abc_gates(s, cu_seqlens)
        s = None
    before = None
    if initial_state is not None:
        before = _slots(op, q, v, g, initial_state, dims["B"] if sequences is None else sequences)
    if s is not None and not _follows(s, g):
        o, states = _two_scans(op, q, k, v, s, g, scale, before, cu_seqlens)
        return o.transpose(1, 2) if head_first else o, states if output_final_state else (None, None)
    o, after = ops.slot_window_attention(
        q, k, v, g, window=0, scale=scale, initial_state=before, cu_seqlens=cu_seqlens,
        output_final_state=output_final_state, impl=impl,
    )  # fmt: skip
    o = o.transpose(1, 2) if head_first else o
    if not isinstance(after, SlotWindowState):
        return o, (None, None)
    return o, (after.slots_k.mT, after.slots_v)


@drops_padding("q", "k", "v", "s", "g")
def _two_scans(
    op: str, q: Tensor, k: Tensor, v: Tensor, s: Tensor, g: Tensor, scale: float | None,
    before: SlotWindowState | None, cu_seqlens: Tensor | None,
) -> tuple[Tensor, States]:  # fmt: skip
    """Compute gated slot attention with any weights s by two recurrences: one for the logits, one for the outputs."""
    _warn_of_speed(op)
    wide = torch.promote_types(q.dtype, torch.float32)
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    parts = []
    for tokens, rows, boundaries in scanned_at_once(cu_seqlens, carried=before is not None):
        b_q, b_k, b_v, b_s, b_g = (x[:, tokens].to(wide) for x in (q, k, v, s, g))
        keys = GatedScan(b_s, b_k, b_g, None if before is None else before.slots_k[rows], boundaries)
        values = GatedScan(b_s, b_v, b_g, None if before is None else before.slots_v[rows], boundaries)
        o = values.rows(keys.columns(factor * b_q).softmax(-1))
        parts.append((o, keys.final.mT, values.final))
    o, hk, hv = zip(*parts, strict=True)
    return torch.cat(o, 1).to(v.dtype), (torch.cat(hk), torch.cat(hv))


@functools.cache
def _warn_of_speed(op: str) -> None:
    warnings.warn(
        f"{op}: s is not 1 - exp(g), so PyTorch's operations run, which are slower than the kernels", stacklevel=5
    )


@drops_padding("s")
def _abc_gates(s: Float[Tensor, "B T H M"], cu_seqlens: Int[Tensor, "N_plus_1"] | None) -> Float[Tensor, "B T H M"]:
    """Return log-gates g_t = z_{t−1} − z_t of attention with bounded memory (ABC); z_t = log Σ_{j ≤ t} e^{s_j}."""
    s = at_least_float32(s)
    if cu_seqlens is not None:
        rows = [_abc_gates(s[:, a:b], None) for a, b in pairwise(cu_seqlens.tolist())]
        return torch.cat(rows, 1)
    z = s.logcumsumexp(1)
    # the first token's log-gate clears the state, which is empty before that token
    return torch.cat((z[:, :1] * 0 + _CLOSED, z[:, :-1] - z[:, 1:]), 1)


@torch.no_grad()
def _follows(s: Tensor, g: Tensor) -> bool:
    """Return whether the weights s equal 1 − e^g, up to rounding."""
    # the caller may have rounded s or g before computing the other from it
    rounding = 4 * max(torch.finfo(x.dtype).eps for x in (s, g))
    return bool(((at_least_float32(s) - (1 - at_least_float32(g).exp())).abs() <= rounding).all())


def _slots(op: str, q: Tensor, v: Tensor, g: Tensor, state: Any, sequences: int) -> SlotWindowState:
    """Return FLA's two states as a `SlotWindowState` whose window is empty."""
    if not isinstance(state, tuple | list) or len(state) != 2:
        raise ValueError(f"{op}: initial_state must be the pair (hk [N, H, K, M], hv [N, H, M, V])")
    sizes = q.shape[-1], v.shape[-1], v.shape[2], g.shape[-1]
    bind_shapes(
        op, dict(zip(("K", "V", "H", "M"), sizes, strict=True)) | {"N": sequences}, q=(q, "B T HQ K"),
        hk=(state[0], "N H K M"), hv=(state[1], "N H M V"),
    )  # fmt: skip
    empty = SlotWindowState.zeros(
        sequences, v.shape[2], g.shape[-1], q.shape[-1], v.shape[-1], 0, dtype=q.dtype, gate_dtype=g.dtype,
        device=q.device,
    )  # fmt: skip
    hk, hv = (as_float32(x, q) for x in state)
    return empty._replace(slots_k=hk.mT.contiguous(), slots_v=hv)
