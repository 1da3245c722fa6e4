"""Compute dk, dv and the gradient of `keep`: by the dK/dV kernel over listed keys, then by sums over heads.

Listed keys are retained keys, gathered by a list of their positions (`softmax_attention/listed_keys/`).
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmix_core.chunking import cdiv
from tokenmix_core.kernels.launch.launcher import cached_launch
from tokenmix_core.kernels.triton.varlen import locate_chunk
from tokenmix_core.ops.buffers import aligned
from tokenmix_core.ops.softmax_attention.launch_args import dense_rows
from tokenmix_core.ops.softmax_attention.listed_keys.backward import listed_keys_backward
from tokenmix_core.ops.softmax_attention.tuning import AttentionTile
from tokenmix_core.ops.softmax_attention.types import KeyLists


@cached_launch
@triton.jit
def _sum_keep(dm, d_keep, cu_seqlens, TK, U, H, HM, N, UNIT: tl.constexpr, BU: tl.constexpr, PACKED: tl.constexpr):
    """Sum dm, each key's term of the gradient of `keep`, over a unit's keys and the key heads that share a `keep` head.

    A program takes BU units of one token, or one longer unit.
    """
    blocks = tl.cdiv(U, BU) if UNIT == 1 else U
    i_u = tl.program_id(0) % blocks
    i_m = (tl.program_id(0) // blocks % HM).to(tl.int64)
    i_b = (tl.program_id(0) // blocks // HM).to(tl.int64)
    heads = H // HM
    p_dm = dm + (i_b * H + i_m * heads) * TK
    if UNIT == 1:
        o_u = i_u * BU + tl.arange(0, BU)
        b_sum = tl.zeros([BU], tl.float32)
        for i in range(0, heads):
            b_sum += tl.load(p_dm + i * TK + o_u, mask=o_u < U, other=0.0)
        tl.store(d_keep + (i_b * U + o_u) * HM + i_m, b_sum.to(d_keep.dtype.element_ty), mask=o_u < U)
    else:
        start = i_b * 0
        length = TK
        first = i_u * UNIT
        if PACKED:
            _, start, length, first = locate_chunk(i_u, TK, UNIT, N, cu_seqlens, PACKED)
        b_sum = tl.zeros([BU], tl.float32)
        for i in range(0, heads):
            for j in range(0, UNIT, BU):
                o_t = first + j + tl.arange(0, BU)
                b_sum += tl.load(p_dm + i * TK + start + o_t, mask=o_t < length, other=0.0)
        tl.store(d_keep + (i_b * U + i_u) * HM + i_m, tl.sum(b_sum, 0).to(d_keep.dtype.element_ty))


def kept_attention_backward_keys(
    q, k, v, do, lse, delta, bias, keys: KeyLists, scale, *, keep: Tensor | None, keep_gradient: str
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return dk and dv and, unless `keep` is None, the gradient of `keep` that `keep_gradient` names.

    `bias` are the bias columns that the Gluon dQ kernel wrote; the Gluon kernel runs if they are given, else the
    portable one.
    """
    dk, dv = k.new_empty(k.shape), v.new_empty(v.shape)
    q, k, v, do = (dense_rows(x) for x in (q, k, v, do))
    (B, TK, H, _), unit = k.shape, keys.unit
    dm = None if keep is None else lse.new_empty(B, H, TK)
    other = {}
    if bias is not None:
        from tokenmix_core.ops.sparse_attention.hopper import TILE
        from tokenmix_core.ops.sparse_attention.hopper.backward_keys import backward_keys

        launch = functools.partial(backward_keys, q=q, k=k, v=v, do=aligned(do), bias=bias, keys=keys, scale=scale)
        other = dict(tile=AttentionTile(TILE, TILE, 4, 2), launch=launch)
    values = keep is not None and keep_gradient == "values"
    listed_keys_backward(q, k, v, do, lse, delta, dk, dv, keys, scale, dm=dm, values=values, **other)
    if keep is None:
        return dk, dv, None
    d_keep = torch.empty_like(keep, memory_format=torch.contiguous_format)
    U, HM = keep.shape[1:]
    BU = 256 if unit == 1 else 64
    N = 0 if keys.cu_seqlens is None else len(keys.cu_seqlens) - 1
    _sum_keep[(B * HM * (cdiv(U, BU) if unit == 1 else U),)](
        dm=dm, d_keep=d_keep, cu_seqlens=keys.cu_seqlens, TK=TK, U=U, H=H, HM=HM, N=N, UNIT=unit, BU=BU,
        PACKED=keys.cu_seqlens is not None,
    )  # fmt: skip
    return dk, dv, d_keep
