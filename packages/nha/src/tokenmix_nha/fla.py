"""Gated slot attention and gated linear attention under flash-linear-attention's names and signatures.

    from fla.ops.gsa import chunk_gsa
    from tokenmix_nha.fla import chunk_gsa

As in `tokenmix_core.integrations.fla`, arguments that only tune FLA's kernels are accepted and ignored; arguments that
ask for a result this package does not compute raise a ValueError.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tokenmix_core.integrations import Result, as_float32, refuse_unknown, tokens_first
from tokenmix_core.nn import at_least_float32
from tokenmix_core.ops import Impl, bind_shapes, check_cu_seqlens
from tokenmix_nha import ops
from tokenmix_nha.ops import SlotWindowState

# log-gate that clears the state: exp(−10⁴) = 0 in float32
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
) -> Result:
    """Compute FLA's `chunk_gla` by `tokenmix_nha.ops.chunk_gla`, which is plain PyTorch.

    Args:
        q, k, v, g, scale, cu_seqlens: as for `tokenmix_nha.ops.chunk_gla`.
        initial_state: state of any float dtype.
        output_final_state: return the state after each sequence; if False, `final_state` is None.
        state_v_first: states are `[N, H, V, K]`.
        head_first: q, k, v, g and o have their heads before T.
        cu_seqlens_cpu: accepted and ignored.

    Returns:
        `(o, final_state)`.

    Raises:
        ValueError: arguments do not fit together.
    """
    q, k, v, g = tokens_first(head_first, q, k, v, g)
    before = as_float32(initial_state, q, v_first=state_v_first)
    o, after = ops.chunk_gla(q, k, v, g, scale=scale, initial_state=before, cu_seqlens=cu_seqlens)
    after = after.mT if state_v_first else after
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
) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    """Compute FLA's `chunk_gsa` by `tokenmix_nha.ops.slot_window_attention` with `window=0`.

    A token enters the slots with weight 1 − e^g, as in Gated Slot Attention (Zhang et al. 2024, eq. 9) and in ABC
    (g None, both weights from normalised sums of e^s). So `s` follows from `g`. If both are given they are compared,
    which synchronises with the device; without `s` the call does not synchronise.

    Args:
        q, k, v, scale, cu_seqlens, impl: as for `tokenmix_nha.ops.slot_window_attention`.
        s: 1 − e^g, or None for the same; without g, the logs of ABC's weights.
        g: log of the gates, ≤ 0.
        initial_state: `(hk [N, H, K, M], hv [N, H, M, V])`, of any float dtype.
        output_final_state: return the same two after each sequence; if False, `final_state` is None.
        head_first: q, k, v, s, g and o have their heads before T.
        checkpoint_level, cu_seqlens_cpu, and `chunk_size` as a keyword: accepted and ignored.

    Returns:
        `(o, final_state)`.

    Raises:
        ValueError: s differs from 1 − e^g, ABC has an initial state, or arguments do not fit together.
    """
    op = "chunk_gsa"
    refuse_unknown(op, more)
    q, k, v, s, g = tokens_first(head_first, q, k, v, s, g)
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
    elif s is not None:
        _check_written(op, s, g)
    before = None
    if initial_state is not None:
        before = _slots(op, q, v, g, initial_state, dims["B"] if sequences is None else sequences)
    o, after = ops.slot_window_attention(
        q, k, v, g, window=0, scale=scale, initial_state=before, cu_seqlens=cu_seqlens,
        output_final_state=output_final_state, impl=impl,
    )  # fmt: skip
    o = o.transpose(1, 2) if head_first else o
    if not isinstance(after, SlotWindowState):
        return o, None
    return o, (after.slots_k.mT, after.slots_v)


def _abc_gates(s: Float[Tensor, "B T H M"], cu_seqlens: Int[Tensor, "N_plus_1"] | None) -> Float[Tensor, "B T H M"]:
    """Return g_t = z_{t−1} − z_t with z_t the log of the sum of e^s up to t: earlier tokens keep their share of it."""
    s = at_least_float32(s)
    if cu_seqlens is not None:
        rows = [_abc_gates(s[:, a:b], None) for a, b in zip(cu_seqlens.tolist(), cu_seqlens.tolist()[1:], strict=False)]
        return torch.cat(rows, 1)
    z = s.logcumsumexp(1)
    # the state before the first token is empty
    return torch.cat((z[:, :1] * 0 + _CLOSED, z[:, :-1] - z[:, 1:]), 1)


@torch.no_grad()
def _check_written(op: str, s: Tensor, g: Tensor) -> None:
    # the caller may have rounded either one before computing the other from it
    rounding = 4 * max(torch.finfo(x.dtype).eps for x in (s, g))
    tied = (at_least_float32(s) - (1 - at_least_float32(g).exp())).abs() <= rounding
    if not bool(tied.all()):
        raise ValueError(f"{op}: s must be 1 - exp(g), by which a token enters the slots here; pass s=None for that")


def _slots(op: str, q: Tensor, v: Tensor, g: Tensor, state: Any, sequences: int) -> SlotWindowState:
    """Return FLA's two states as a `SlotWindowState` with an empty window."""
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
