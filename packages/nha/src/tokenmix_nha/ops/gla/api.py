"""The public function of gated linear attention: shapes, validation, packed sequences."""

from __future__ import annotations

from itertools import pairwise

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tokenmix_core.ops import (
    ScanOutput,
    bind_shapes,
    check_cu_seqlens,
    check_dtype,
    check_multiple,
    check_same_dtype,
    check_scale,
    drops_padding,
)
from tokenmix_nha.ops.gla.scan import GatedScan

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def chunk_gla(
    q: Float[Tensor, "B T HQ K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H V"],
    g: Float[Tensor, "B T H K"],
    *,
    scale: float | None = None,
    initial_state: Float[Tensor, "N H K V"] | None = None,
    cu_seqlens: Int[Tensor, "N_plus_1"] | None = None,
) -> ScanOutput:
    r"""Compute gated linear attention (Yang et al. 2023) chunkwise, with one gate per key channel.

    .. math:: S_t = \mathrm{Diag}(e^{g_t}) S_{t-1} + k_t v_t^\top, \qquad o_t = \text{scale} \cdot S_t^\top q_t

    Plain PyTorch on every device, without kernels, because this is a baseline and not a fast path. Differentiable in
    every tensor argument and through both results. Packed sequences with initial states run one after another, and the
    call then waits for the device.

    Args:
        q: `[B, T, HQ, K]`; HQ is a multiple of H, and query head h reads head h // (HQ / H).
        k, v: `[B, T, H, K]`, `[B, T, H, V]`, in q's dtype.
        g: `[B, T, H, K]`, natural log of the gates, ≤ 0, any float dtype.
        scale: factor of the outputs; None stands for K ** −0.5.
        initial_state: `[N, H, K, V]`, float32 (float64 for float64 inputs); None stands for zero.
        cu_seqlens: `[N + 1]` int32 or int64, the boundaries of N sequences packed into one row (B = 1).

    Returns:
        ScanOutput: o `[B, T, HQ, V]` in q's dtype, and the state after each sequence.

    Raises:
        ValueError: shapes, dtypes, devices, head counts or cu_seqlens do not fit; the message names the argument with
            its actual and its expected value.
    """
    op = "chunk_gla"
    dims = bind_shapes(op, {}, q=(q, "B T HQ K"), k=(k, "B T H K"), v=(v, "B T H V"), g=(g, "B T H K"))
    sequences = check_cu_seqlens(op, cu_seqlens, dims["B"], dims["T"])
    dims["N"] = dims["B"] if sequences is None else sequences
    bind_shapes(op, dims, q=(q, "B T HQ K"), cu_seqlens=(cu_seqlens, "_?"), initial_state=(initial_state, "N H K V?"))
    check_dtype(op, FLOATS, q=q, k=k, v=v, g=g)
    check_same_dtype(op, q=q, k=k, v=v)
    check_multiple(op, "HQ", dims["HQ"], "H", dims["H"])
    wide = torch.promote_types(q.dtype, torch.float32)
    check_dtype(op, (wide,), initial_state=initial_state)
    factor = dims["K"] ** -0.5 if scale is None else check_scale(op, scale)
    return _chunk_gla(q, k, v, g, factor, initial_state, cu_seqlens)


@drops_padding("q", "k", "v", "g")
def _chunk_gla(q, k, v, g, factor: float, initial_state: Tensor | None, cu_seqlens: Tensor | None) -> ScanOutput:
    wide, parts = torch.promote_types(q.dtype, torch.float32), []
    for tokens, rows, boundaries in scanned_at_once(cu_seqlens, carried=initial_state is not None):
        b_q, b_k, b_v, b_g = (x[:, tokens].to(wide) for x in (q, k, v, g))
        scan = GatedScan(b_k, b_v, b_g, None if initial_state is None else initial_state[rows], boundaries)
        parts.append((scan.rows(factor * b_q), scan.final))
    o, states = zip(*parts, strict=True)
    return ScanOutput(torch.cat(o, 1).to(q.dtype), torch.cat(states))


def scanned_at_once(
    cu_seqlens: Int[Tensor, "N_plus_1"] | None, *, carried: bool
) -> list[tuple[slice, slice, Int[Tensor, "N_plus_1"] | None]]:
    """Return (token slice, state slice, boundaries) of each scan: one for all tokens or, if packed sequences have
    initial states (`carried`), one per sequence.
    """
    if cu_seqlens is None or not carried:
        return [(slice(None), slice(None), cu_seqlens)]
    return [(slice(a, b), slice(n, n + 1), None) for n, (a, b) in enumerate(pairwise(cu_seqlens.tolist()))]
