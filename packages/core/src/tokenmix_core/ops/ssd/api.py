"""State-space duality: public functions, validation and dispatch."""

from __future__ import annotations

from functools import partial

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tokenmix_core.kernels.launch.cache.replay import Checked
from tokenmix_core.ops import checks
from tokenmix_core.ops.decode_tiles import step_limit
from tokenmix_core.ops.dispatch import resolve_impl
from tokenmix_core.ops.exporting import exportable, scan_shapes
from tokenmix_core.ops.slots import (
    Pool,
    at_slots,
    check_pool,
    check_spacing,
    check_written,
    first_axis,
    refuse_gradients,
    scan_at_slots,
    state_dtypes,
)
from tokenmix_core.ops.ssd.plan import GLUON, GLUON_STEP, limit
from tokenmix_core.ops.ssd.reference import chunk_ssd_reference, recurrent_ssd_reference, ssd_step_reference
from tokenmix_core.ops.ssd.types import Inputs
from tokenmix_core.ops.types import Impl, ScanOutput

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
HEAD_SIZES = (16, 32, 64, 128, 256)


def chunk_ssd(
    q: Float[Tensor, "B T G K"],
    k: Float[Tensor, "B T G K"],
    v: Float[Tensor, "B T HV V"],
    g: Float[Tensor, "B T HV"],
    *,
    dt: Float[Tensor, "B T HV"] | None = None,
    D: Float[Tensor, "HV"] | None = None,
    scale: float = 1.0,
    initial_state: Float[Tensor, "N HV K V"] | None = None,
    cu_seqlens: Int[Tensor, "N_plus_1"] | None = None,
    impl: Impl | None = None,
) -> ScanOutput:
    r"""Apply state-space duality (Mamba-2; with G = HV also simple gated linear attention), chunk by chunk.

    .. math:: S_t = e^{g_t} S_{t-1} + k_t (Δ_t v_t)^\top, \qquad o_t = \text{scale} \cdot S_t^\top q_t + D v_t

    Mamba-2 passes q = C, k = B, v = x, dt = Δ and g = Δ · A. Value head h reads group h // (HV / G) of q and k, which
    are never expanded. Differentiable in every tensor argument and through both results.

    Args:
        q, k: `[B, T, G, K]`; G divides HV.
        v: `[B, T, HV, V]`. q, k and v share one dtype: bfloat16, float16 or float32 (the reference also float64).
        g: `[B, T, HV]`, natural log of the decay, ≤ 0; any float dtype, float32 is the most exact.
        dt: `[B, T, HV]`, step size Δ: v is scaled by Δ when it is written to the state; any float dtype; None is 1.
        D: `[HV]`, the weight of the skip connection from v to o, any float dtype; None is 0.
        scale: factor of the output.
        initial_state: `[N, HV, K, V]` float32, the state before the first token of each sequence; None is zero.
        cu_seqlens: `[N + 1]` int32 or int64, the boundaries of N sequences packed into one row (B = 1).
        impl: "gluon" (Hopper, bfloat16 or float16, K and V of 64, 128 or 256), "triton" (portable kernels; K and V of
            16, 32, 64, 128 or 256), "reference" (any size and device), or None: Gluon if it runs here, else Triton for
            CUDA tensors, else the reference. Gluon uses the portable kernel of a step where that is faster;
            `tokenmix_core.ops.explain` names the kernels.

    Returns:
        ScanOutput: o `[B, T, HV, V]` in v's dtype and final_state `[N, HV, K, V]` in float32.

    Raises:
        ValueError: shapes, dtypes, devices, G or cu_seqlens do not fit; the message has the given and expected ones.
    """
    x = Inputs(
        q=q, k=k, v=v, g=g, initial_state=initial_state, dt=dt, D=D, cu_seqlens=cu_seqlens, scale=scale, impl=impl
    )
    return _scan("chunk_ssd", x)


def recurrent_ssd(
    q: Float[Tensor, "B T G K"],
    k: Float[Tensor, "B T G K"],
    v: Float[Tensor, "B T HV V"],
    g: Float[Tensor, "B T HV"],
    *,
    dt: Float[Tensor, "B T HV"] | None = None,
    D: Float[Tensor, "HV"] | None = None,
    scale: float = 1.0,
    initial_state: Float[Tensor, "N HV K V"] | None = None,
    cu_seqlens: Int[Tensor, "N_plus_1"] | None = None,
    impl: Impl | None = None,
) -> ScanOutput:
    """Compute `chunk_ssd` token by token; this is fastest for sequences of only a few tokens.

    Arguments, results, gradients and errors are those of `chunk_ssd`. Gluon kernels exist for the backward pass only,
    so `impl="gluon"` is an error.
    """
    x = Inputs(
        q=q, k=k, v=v, g=g, initial_state=initial_state, dt=dt, D=D, cu_seqlens=cu_seqlens, scale=scale, impl=impl
    )
    return _scan("recurrent_ssd", x)


_CHUNK_REFERENCE, _RECURRENT_REFERENCE = (
    exportable(run, scan_shapes) for run in (chunk_ssd_reference, recurrent_ssd_reference)
)


def _scan(op: str, x: Inputs) -> ScanOutput:
    """Run a call on whole sequences with the reference or the kernels, after validation of its arguments."""
    impl, scale = check_scan(op, *x)
    return _run(op, x._replace(scale=scale, impl=impl), impl)


def _run(op: str, x: Inputs, impl: str | None) -> ScanOutput:
    """Run a valid call with the implementation `impl`."""
    if impl == "reference":
        reference = _CHUNK_REFERENCE if op == "chunk_ssd" else _RECURRENT_REFERENCE
        found = reference(
            x.q, x.k, x.v, x.g, dt=x.dt, D=x.D, scale=x.scale, initial_state=x.initial_state, cu_seqlens=x.cu_seqlens
        )
        return ScanOutput(*found)
    from tokenmix_core.ops.ssd import autograd

    return autograd.run_widened(autograd.chunk if op == "chunk_ssd" else autograd.recurrent, x)


def ssd_prefill(
    q: Float[Tensor, "B T G K"],
    k: Float[Tensor, "B T G K"],
    v: Float[Tensor, "B T HV V"],
    g: Float[Tensor, "B T HV"],
    state: Float[Tensor, "S HV K V"],
    *,
    slots: Int[Tensor, "N"],
    fresh: Bool[Tensor, "N"] | None = None,
    dt: Float[Tensor, "B T HV"] | None = None,
    D: Float[Tensor, "HV"] | None = None,
    scale: float = 1.0,
    cu_seqlens: Int[Tensor, "N_plus_1"] | None = None,
    impl: Impl | None = None,
) -> Float[Tensor, "B T HV V"]:
    """Compute `chunk_ssd` from and into slots of a pool of states. Not differentiable.

    The kernels read initial states from slots and write final states to them: no other kernel copies states, except in
    float32 with K or V below 64 on a GPU.

    Args:
        q, k, v, g, dt, D, scale, cu_seqlens, impl: as for `chunk_ssd`.
        state, slots, fresh: as for `gated_delta_rule_prefill`.

    Returns:
        o `[B, T, HV, V]` in v's dtype.

    Raises:
        ValueError: as for `chunk_ssd` and `gated_delta_rule_prefill`.
    """
    op = "ssd_prefill"
    refuse_gradients(op, q=q, k=k, v=v, g=g, dt=dt, D=D, state=state)
    x = Inputs(q=q, k=k, v=v, g=g, initial_state=None, dt=dt, D=D, cu_seqlens=cu_seqlens, scale=scale, impl=impl)
    impl, scale = _check_prefill(op, state, slots, fresh, *x)
    x = x._replace(scale=scale, impl=impl)
    if impl != "reference":
        from tokenmix_core.ops.ssd import autograd

        if not autograd.needs_widening(v, q.shape[3], v.shape[3]):
            return autograd.prefill(state, slots, fresh, *x)

    def run(before: Tensor) -> ScanOutput:
        wide = before.to(torch.promote_types(before.dtype, torch.float32))
        return _run("chunk_ssd", x._replace(initial_state=wide), impl)

    return scan_at_slots(run, Pool(state, slots, fresh))


@torch.no_grad()
def ssd_step(
    q: Float[Tensor, "B G K"],
    k: Float[Tensor, "B G K"],
    v: Float[Tensor, "B HV V"],
    g: Float[Tensor, "B HV"],
    state: Float[Tensor, "_rows HV K V"],
    *,
    slots: Int[Tensor, "B"] | None = None,
    dt: Float[Tensor, "B HV"] | None = None,
    D: Float[Tensor, "HV"] | None = None,
    scale: float = 1.0,
    impl: Impl | None = None,
) -> Float[Tensor, "B HV V"]:
    """Overwrite `state` with the state after one more token; return the token's output. Not differentiable.

    Args:
        q, k: `[B, G, K]`, one token.
        v: `[B, HV, V]`.
        g: `[B, HV]`, natural log of the decay.
        state: `[B, HV, K, V]` float32 (a pool also 16 bits), contiguous; overwritten with exp(g) · state + k (Δ v)ᵀ.
        slots: as for `gated_delta_rule_step`: row n reads and overwrites slot `slots[n]` of the pool
            `state [S, HV, K, V]`.
        dt: `[B, HV]`, Δ; None is 1.
        D: `[HV]`; None is 0.
        scale: factor of the output.
        impl: as for `chunk_ssd`, except that Gluon also takes float32, and only K = 128 with V ≥ 64.

    Returns:
        o `[B, HV, V]` in v's dtype: scale · stateᵀ q + D v with the updated state.

    Raises:
        ValueError: as `chunk_ssd`.
    """
    impl, scale = _check_step(q, k, v, g, dt, D, state, slots, scale, impl)
    if impl != "reference":
        from tokenmix_core.ops.ssd.autograd import step

        return step(q, k, v, g, state, dt, D, scale, impl, slots)
    return at_slots(partial(ssd_step_reference, D, scale), slots, (q, k, v, g, dt), (state,))


@Checked
def check_scan(op: str, *inputs) -> tuple[str | None, float]:
    """Validate the `Inputs` of a call on whole sequences; return the result of `resolve_impl`, and the scale."""
    _, impl, scale = _bind(op, Inputs(*inputs))
    return impl, scale


@Checked
def _check_prefill(op: str, state, slots, fresh, *inputs) -> tuple[str | None, float]:
    """Validate the arguments of a prefill in slots; return the result of `resolve_impl`, and the scale."""
    x = Inputs(*inputs)
    dims, impl, scale = _bind(op, x)
    check_pool(op, dims, (x.q, "B T G K"), "HV K V", state=state, slots=slots, fresh=fresh)
    checks.check_dtype(op, (torch.float64,) if x.q.dtype == torch.float64 else state_dtypes(slots), state=state)
    check_spacing(op, slots, state, impl)
    return impl, scale


def _bind(op: str, x: Inputs) -> tuple[dict[str, int], str | None, float]:
    """Validate the arguments of a call on whole sequences; return sizes, the result of `resolve_impl`, the scale."""
    dims = checks.bind_shapes(
        op, {}, q=(x.q, "B T G K"), k=(x.k, "B T G K"), v=(x.v, "B T HV V"), g=(x.g, "B T HV"), dt=(x.dt, "B T HV?"),
        D=(x.D, "HV?"),
    )  # fmt: skip
    impl = resolve_impl(op, x.impl, x.q, None if op == "recurrent_ssd" else GLUON)
    if impl == "gluon":
        GLUON.require(op, x.q.device, x.q.dtype, limit(dims["K"], dims["V"]))
    if dims["T"] < 1:
        raise ValueError(f"{op}: q must hold at least one token, got T = {dims['T']}")
    sequences = checks.check_cu_seqlens(op, x.cu_seqlens, dims["B"], dims["T"])
    dims["N"] = dims["B"] if sequences is None else sequences
    # pass q again: devices of the other tensors are compared with that of the first tensor
    checks.bind_shapes(
        op, dims, q=(x.q, "B T G K"), initial_state=(x.initial_state, "N HV K V?"), cu_seqlens=(x.cu_seqlens, "_?")
    )
    _check_rest(op, impl, dims, x.q, x.k, x.v, x.g, x.dt, x.D, initial_state=x.initial_state)
    return dims, impl, checks.check_scale(op, x.scale)


@Checked
def _check_step(q, k, v, g, dt, D, state, slots, scale, impl) -> tuple[str | None, float]:
    """Validate the arguments of a decoding step; return the result of `resolve_impl`, and the scale."""
    dims = checks.bind_shapes(
        "ssd_step", {}, q=(q, "B G K"), k=(k, "B G K"), v=(v, "B HV V"), g=(g, "B HV"),
        state=(state, f"{first_axis(slots)} HV K V"), dt=(dt, "B HV?"), D=(D, "HV?"), slots=(slots, "B?"),
    )  # fmt: skip
    impl = resolve_impl("ssd_step", impl, q, GLUON_STEP)
    if impl == "gluon":
        GLUON_STEP.require("ssd_step", q.device, q.dtype, step_limit(dims["K"], dims["V"]))
    _check_rest("ssd_step", impl, dims, q, k, v, g, dt, D, slots, state=state)
    check_written("ssd_step", slots, state=state)
    check_spacing("ssd_step", slots, state, impl)
    return impl, checks.check_scale("ssd_step", scale)


def _check_rest(op, impl, dims, q, k, v, g, dt, D, slots=None, **state: Tensor | None) -> None:
    """Check dtypes, head counts, and the head sizes that kernels support."""
    floats = (*FLOATS, torch.float64) if impl == "reference" else FLOATS
    checks.check_dtype(op, floats, q=q, k=k, v=v, g=g, dt=dt, D=D)
    checks.check_same_dtype(op, q=q, k=k, v=v)
    checks.check_dtype(op, (torch.float64,) if q.dtype == torch.float64 else state_dtypes(slots), **state)
    checks.check_multiple(op, "HV", dims["HV"], "G", dims["G"])
    for letter in "KV":
        if impl != "reference" and dims[letter] not in HEAD_SIZES:
            raise ValueError(
                f"{op}: impl={impl or 'triton'!r} needs {letter} in {', '.join(map(str, HEAD_SIZES))}, "
                f"got {letter}={dims[letter]}; pad the head size or pass impl='reference'"
            )
