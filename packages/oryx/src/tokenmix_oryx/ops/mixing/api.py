"""The steps between an Oryx layer's projections as one operation, for tokens in linear and in attention mode.

This module checks the arguments and selects the implementation.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tokenmix_core.nn import Rotation
from tokenmix_core.ops import (
    DELTA_RULE_HEAD_SIZES,
    SSD_HEAD_SIZES,
    Impl,
    bind_shapes,
    check_cu_seqlens,
    check_dtype,
    check_multiple,
    check_same_dtype,
    resolve_impl,
)
from tokenmix_core.ops import GLUON as ATTENTION
from tokenmix_oryx.ops.mixing.reference import mix_reference


class MixOptions(NamedTuple):
    """The options of a layer that `mix` needs.

    Attributes:
        heads: number of heads H.
        silu_shared: whether SiLU follows the convolutions of keys and values.
        silu_attention_query, silu_linear_query: whether SiLU is applied to the queries of each mode.
        rotate_linear: whether the linear mixer uses rotated queries and keys, as attention always does.
        gate_before: whether the gate acts before the norm instead of after it.
        groups: number of groups of E / groups channels that the norm normalises separately.
        eps: epsilon of the norm.
    """

    heads: int
    silu_shared: bool
    silu_attention_query: bool
    silu_linear_query: bool
    rotate_linear: bool
    gate_before: bool
    groups: int
    eps: float


FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def mix(
    rows: Float[Tensor, "N E"],
    shared: Float[Tensor, "B T C"],
    *,
    A_log: Float[Tensor, "H"],
    dt_bias: Float[Tensor, "H"],
    D: Float[Tensor, "H"] | None = None,
    k_weight: Float[Tensor, "E W"],
    v_weight: Float[Tensor, "E W"],
    norm_weight: Float[Tensor, "E"],
    attends: Bool[Tensor, "B T"],
    rotation: Rotation,
    options: MixOptions,
    row_ids: Int[Tensor, "N"] | None = None,
    cu_seqlens: Int[Tensor, "N_plus_1"] | None = None,
    impl: Impl | None = None,
) -> Float[Tensor, "B T E"]:
    r"""Compute all steps between a layer's projections, for tokens that each use attention or the linear mixer.

    Let a ∗ w be a causal convolution along time, σ SiLU or the identity (by the options), R the rotation, and `shared`
    = [k, v, z, δ, b] by columns, where the first three have E columns each and the others H:

    .. math:: K = \sigma(k ∗ w_k), \quad V = \sigma(v ∗ w_v), \quad q_t = \sigma(\text{rows}_{\text{row_ids}_t}), \quad
        \Delta = \text{softplus}(\delta + \text{bias}), \quad g = -e^{A_\log} \Delta

    .. math:: o_t = \text{attention}(R q, R K, V)_t \;\text{if `attends`, else}\; \text{linear}(q, K, V)_t

    and y is o, normalised and gated by silu(z). With `rotate_linear`, linear takes R q and R K. If D is given, linear
    is SSD, o = SSD(q, K, Δ V, g) + D V. If D is None, linear is the gated delta rule with g, β = sigmoid(b), and
    L2-normalised q and k. Differentiable in all floating-point tensors except the rotation.

    Args:
        rows: each token's query from the projection for its mode, N = B · T.
        shared: the projections that both modes use, in the dtype of `rows`; further columns are padding.
        A_log, dt_bias: parameters of the decay and of the step Δ.
        D: skip weight of SSD; None for the delta rule.
        k_weight, v_weight: weights of the two convolutions, of width W.
        norm_weight: weight of the norm.
        attends: True for the tokens in attention mode.
        rotation: cosines and sines of each token's rotation angles, used for every head.
        row_ids: the row in `rows` of each token's query; None if rows have the order of the tokens.
        cu_seqlens: boundaries of packed sequences, for B = 1.
        impl: "gluon" (Hopper, bfloat16 or float16: attention's gradients and the linear mixer, for head sizes that both
            support), "triton" (portable kernels), "reference" (any device), or None: Gluon for each part that supports
            it, then Triton on CUDA tensors, else the reference.

    Raises:
        ValueError: shapes, dtypes, devices or options do not fit; the message has the given and the expected values.
    """
    op = "mix"
    if not isinstance(rotation, Rotation):
        raise ValueError(f"{op}: rotation must be a Rotation of cos and sin, got {type(rotation).__name__}")
    dims = bind_shapes(
        op, {}, shared=(shared, "B T C"), rows=(rows, "N E"), A_log=(A_log, "H"), dt_bias=(dt_bias, "H"), D=(D, "H?"),
        k_weight=(k_weight, "E W"), v_weight=(v_weight, "E W"), norm_weight=(norm_weight, "E"),
        attends=(attends, "B T"), row_ids=(row_ids, "N?"), cu_seqlens=(cu_seqlens, "N_plus_1?"),
        cos=(rotation.cos, "BR T HALF"), sin=(rotation.sin, "BR T HALF"),
    )  # fmt: skip
    chosen = resolve_impl(op, impl, rows, ATTENTION)
    B, T, E, H, C = (dims[name] for name in "BTEHC")
    if dims["N"] < 1:
        raise ValueError(f"{op}: B and T must be at least 1, got B={B} and T={T}")
    if options.heads != H or 2 * H * dims["HALF"] != E or dims["N"] != B * T or dims["BR"] not in (1, B):
        raise ValueError(
            f"{op}: expected {options.heads} heads, E = H · K, N = B · T, and 1 or B rows of K / 2 angles, got H={H}, "
            f"E={E}, N={dims['N']}, B={B}, T={T} and a rotation of shape {list(rotation.cos.shape)}"
        )
    columns = 3 * E + (H if D is not None else 2 * H)
    if columns > C:
        raise ValueError(f"{op}: shared must have at least {columns} columns, got {C}")
    check_dtype(op, (*FLOATS, torch.float64) if chosen == "reference" else FLOATS, rows=rows)
    check_same_dtype(op, rows=rows, shared=shared)
    check_dtype(op, (torch.bool,), attends=attends)
    check_multiple(op, "E", E, "groups", options.groups)
    check_cu_seqlens(op, cu_seqlens, B, T)
    given = dict(
        rows=rows, shared=shared, A_log=A_log, dt_bias=dt_bias, D=D, k_weight=k_weight, v_weight=v_weight,
        norm_weight=norm_weight, row_ids=row_ids, attends=attends, cu_seqlens=cu_seqlens,
    )  # fmt: skip
    if chosen == "reference":
        return mix_reference(**given, rotation=rotation, options=options)
    sizes = DELTA_RULE_HEAD_SIZES if D is None else SSD_HEAD_SIZES
    if E // H not in sizes:
        raise ValueError(
            f"{op}: impl={chosen or 'triton'!r} takes head sizes of {', '.join(map(str, sizes))}, got {E // H}; "
            "pad the heads, or pass impl='reference'"
        )
    if chosen == "gluon" and E // H not in (64, 128):
        ATTENTION.require(op, rows.device, rows.dtype, f"takes head sizes of 64 and 128, got {E // H}")
    from tokenmix_oryx.ops.mixing import autograd

    # angles that are equal for all sequences are stored once, for one sequence
    cos, sin = (x.flatten(0, 1).contiguous() for x in rotation)
    flags = {name: x for name, x in options._asdict().items() if name != "heads"}
    return autograd.mix(*autograd.Inputs(**given, cos=cos, sin=sin, **flags, impl=chosen))[0]
