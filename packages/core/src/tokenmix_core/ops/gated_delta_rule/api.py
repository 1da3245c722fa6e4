"""The gated delta rule: public functions, validation and dispatch."""

from __future__ import annotations

from functools import partial

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tokenmix_core.chunking import chunk_slots
from tokenmix_core.kernels.launch.cache.replay import Checked
from tokenmix_core.ops import checks
from tokenmix_core.ops.decode_tiles import step_limit
from tokenmix_core.ops.dispatch import resolve_impl
from tokenmix_core.ops.exporting import exportable, scan_shapes
from tokenmix_core.ops.gated_delta_rule.constants import CHUNK
from tokenmix_core.ops.gated_delta_rule.plan import GLUON, GLUON_STEP
from tokenmix_core.ops.gated_delta_rule.reference import chunk_reference, recurrent_reference
from tokenmix_core.ops.gated_delta_rule.types import Inputs
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
from tokenmix_core.ops.types import Impl, ScanOutput

HEAD_SIZES = (64, 128, 256)
_INPUTS = (torch.bfloat16, torch.float16, torch.float32)


def chunk_gated_delta_rule(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T HV V"],
    g: Float[Tensor, "B T HV"],
    beta: Float[Tensor, "B T HV"],
    *,
    scale: float | None = None,
    initial_state: Float[Tensor, "N HV K V"] | None = None,
    cu_seqlens: Int[Tensor, "N_plus_1"] | None = None,
    qk_l2norm: bool = False,
    writes: Float[Tensor, "B slots HV"] | None = None,
    write_chunk: int = 64,
    impl: Impl | None = None,
) -> ScanOutput:
    """Apply the gated delta rule to whole sequences, chunk by chunk, for training and prefill.

        S_t = exp(g_t) S_{t−1} + β_t k_t (v_t − exp(g_t) S_{t−1}ᵀ k_t)ᵀ        o_t = scale · S_tᵀ q_t

    (Yang et al. 2025, Gated Delta Networks, eq. 10, with the state transposed.) Gradients flow to every tensor
    argument, through `o` and through `final_state`.

    Args:
        q: queries; H heads.
        k: keys, in q's dtype.
        v: values, in q's dtype; HV heads, a multiple of H: q/k head h serves value heads h·HV/H to (h+1)·HV/H − 1.
        g: natural log of the decay, ≤ 0; values below −110 are clamped to −110, at which the decay is 0 in float32.
        beta: strength of each write, in [0, 2].
        scale: factor on the outputs; None is K ** −0.5.
        initial_state: the state before the first token of each sequence; None is zero. N is B, or the number of
            packed sequences.
        cu_seqlens: boundaries of packed sequences (then B = 1), which may be empty.
        qk_l2norm: replace each vector x of q and k by x · rsqrt(Σ x² + 1e−6).
        writes: a factor m, any real number, for each run of `write_chunk` tokens and value head. With S₀ the state
            before such a run, the state after it is e^{Σ g} S₀ + m (S − e^{Σ g} S₀) instead of S; the outputs of these
            tokens are those of m = 1. A last, partial run follows the same rule. Runs are counted from each
            sequence's start: there are ⌈T / write_chunk⌉ entries or, for a packed batch, `chunking.chunk_slots`, in
            the order of `chunking.slot_ids`. None sets all factors to 1.
        write_chunk: how many tokens share a factor of `writes`, a multiple of 64.
        impl: "gluon" (Hopper, bfloat16 or float16), "triton" (portable kernels; also float32), both for K and V in {64,
            128, 256}, "reference" (any size and device), or None: Gluon if it runs here, else Triton for CUDA tensors,
            else the reference. Gluon uses the portable kernel of a step where that is faster;
            `tokenmix_core.ops.explain` names the kernels. With `writes` Gluon takes a `write_chunk` of 64; longer ones
            run portable kernels.

    Returns:
        `o [B, T, HV, V]` in v's dtype and `final_state [N, HV, K, V]` in float32 (float64 for float64 inputs, which
        the reference takes).

    Raises:
        ValueError: shapes, dtypes, devices or sizes do not fit; the message has the given and the expected ones.
    """
    x = Inputs(
        q=q, k=k, v=v, g=g, beta=beta, initial_state=initial_state, writes=writes, cu_seqlens=cu_seqlens, scale=scale,
        qk_l2norm=qk_l2norm, impl=impl, write_chunk=write_chunk,
    )  # fmt: skip
    return _scan("chunk_gated_delta_rule", x)


def recurrent_gated_delta_rule(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T HV V"],
    g: Float[Tensor, "B T HV"],
    beta: Float[Tensor, "B T HV"],
    *,
    scale: float | None = None,
    initial_state: Float[Tensor, "N HV K V"] | None = None,
    cu_seqlens: Int[Tensor, "N_plus_1"] | None = None,
    qk_l2norm: bool = False,
    writes: Float[Tensor, "B slots HV"] | None = None,
    write_chunk: int = 64,
    impl: Impl | None = None,
) -> ScanOutput:
    """Compute `chunk_gated_delta_rule` token by token; this is fastest for sequences of only a few tokens.

    Arguments, results, gradients and errors are those of `chunk_gated_delta_rule`. Gluon kernels exist for the backward
    pass only, so `impl="gluon"` is an error.
    """
    x = Inputs(
        q=q, k=k, v=v, g=g, beta=beta, initial_state=initial_state, writes=writes, cu_seqlens=cu_seqlens, scale=scale,
        qk_l2norm=qk_l2norm, impl=impl, write_chunk=write_chunk,
    )  # fmt: skip
    return _scan("recurrent_gated_delta_rule", x)


_CHUNK_REFERENCE, _RECURRENT_REFERENCE = (
    exportable(run, scan_shapes) for run in (chunk_reference, recurrent_reference)
)


def _scan(op: str, x: Inputs) -> ScanOutput:
    """Run a call on whole sequences with the reference or the kernels, after validation of its arguments."""
    impl, scale = check_scan(op, *x)
    if impl == "reference":
        reference = _CHUNK_REFERENCE if op == "chunk_gated_delta_rule" else _RECURRENT_REFERENCE
        found = reference(
            q=x.q, k=x.k, v=x.v, g=x.g, beta=x.beta, scale=scale, initial_state=x.initial_state,
            cu_seqlens=x.cu_seqlens, qk_l2norm=x.qk_l2norm, writes=x.writes, write_chunk=x.write_chunk,
        )  # fmt: skip
        return ScanOutput(*found)
    from tokenmix_core.ops.gated_delta_rule.autograd import chunk, recurrent

    kernels = chunk if op == "chunk_gated_delta_rule" else recurrent
    return ScanOutput(*kernels(*x._replace(impl=impl, scale=scale)))


def gated_delta_rule_prefill(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T HV V"],
    g: Float[Tensor, "B T HV"],
    beta: Float[Tensor, "B T HV"],
    state: Float[Tensor, "S HV K V"],
    *,
    slots: Int[Tensor, "N"],
    fresh: Bool[Tensor, "N"] | None = None,
    scale: float | None = None,
    cu_seqlens: Int[Tensor, "N_plus_1"] | None = None,
    qk_l2norm: bool = False,
    impl: Impl | None = None,
) -> Float[Tensor, "B T HV V"]:
    """Compute `chunk_gated_delta_rule` from and into slots of a pool of states. Not differentiable.

    The kernels read initial states from slots and write final states to them. An initial state is copied only if its
    sequence is split into segments.

    Args:
        q, k, v, g, beta, scale, cu_seqlens, qk_l2norm, impl: as for `chunk_gated_delta_rule`.
        state: a pool `[S, HV, K, V]` in float32, bfloat16 or float16. The elements of a slot are contiguous; the slots
            may be any distance apart. Kernels compute in float32, and round a final state once.
        slots: int32 or int64 `[N]`: sequence n starts from slot `slots[n]`, and overwrites it with its final state. A
            sequence with a negative slot starts from a zero state, and its final state is dropped. No two sequences
            may have the same slot, unless it is negative.
        fresh: bool `[N]`, True for a sequence that starts from a zero state and does not read its slot; None if none
            does.

    Returns:
        o `[B, T, HV, V]` in v's dtype.

    Raises:
        ValueError: shapes, dtypes, devices, sizes or slots do not fit, or a tensor requires a gradient.
    """
    op = "gated_delta_rule_prefill"
    refuse_gradients(op, q=q, k=k, v=v, g=g, beta=beta, state=state)
    x = Inputs(
        q=q, k=k, v=v, g=g, beta=beta, initial_state=None, writes=None, cu_seqlens=cu_seqlens, scale=scale,
        qk_l2norm=qk_l2norm, impl=impl,
    )  # fmt: skip
    impl, scale = _check_prefill(op, state, slots, fresh, *x)
    if impl == "reference":
        run = partial(chunk_reference, q, k, v, g, beta, scale, cu_seqlens=cu_seqlens, qk_l2norm=qk_l2norm)
        return scan_at_slots(lambda before: ScanOutput(*run(initial_state=before)), Pool(state, slots, fresh))
    from tokenmix_core.ops.gated_delta_rule.autograd import prefill

    return prefill(state, slots, fresh, *x._replace(scale=scale, impl=impl))


def gated_delta_rule_step(
    q: Float[Tensor, "B H K"],
    k: Float[Tensor, "B H K"],
    v: Float[Tensor, "B HV V"],
    g: Float[Tensor, "B HV"],
    beta: Float[Tensor, "B HV"],
    state: Float[Tensor, "_rows HV K V"],
    *,
    slots: Int[Tensor, "B"] | None = None,
    scale: float | None = None,
    qk_l2norm: bool = False,
    impl: Impl | None = None,
) -> Float[Tensor, "B HV V"]:
    """Overwrite `state` with the state after one more token; return the token's output. Not differentiable.

    Args:
        q, k: `[B, H, K]`, one token of each sequence; H divides HV.
        v: `[B, HV, V]`.
        g: `[B, HV]`, natural log of the decay, at most 0.
        beta: `[B, HV]`, strength of the write.
        state: `[B, HV, K, V]` float32, contiguous; overwritten with the state after this token.
        slots: int32 or int64 `[B]`. `state` is then a pool `[S, HV, K, V]`, of which row n reads and overwrites slot
            `slots[n]`; a row with a negative slot is padding: its output is zero, and it reads and writes no slot. No
            two rows may have the same slot, unless it is negative. The slots may be any distance apart, and the pool
            may also be bfloat16 or float16: it rounds the state once per token. None: row n has the n-th state.
        scale, qk_l2norm: as for `chunk_gated_delta_rule`.
        impl: as for `chunk_gated_delta_rule`, except that Gluon also takes float32, and only K = 128 with V ≥ 64.

    Returns:
        o `[B, HV, V]` in v's dtype: scale · stateᵀ q with the updated state.

    Raises:
        ValueError: shapes, dtypes, devices or sizes do not fit; the message has the given and the expected ones.
    """
    impl, scale = _check_step(q, k, v, g, beta, state, slots, scale, impl)
    with torch.no_grad():
        if impl == "reference":
            return at_slots(partial(_step_reference, scale, qk_l2norm), slots, (q, k, v, g, beta), (state,))
        from tokenmix_core.ops.gated_delta_rule.autograd import step

        return step(q, k, v, g, beta, state, scale, qk_l2norm, impl, slots)


def _step_reference(scale: float, qk_l2norm: bool, *token: Tensor) -> Tensor:
    """Return the output of one token, and overwrite the last of the given tensors, the state."""
    *rows, state = token
    o, updated = recurrent_reference(*(x.unsqueeze(1) for x in rows), scale, state, qk_l2norm=qk_l2norm)
    state.copy_(updated)
    return o.squeeze(1)


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
    check_pool(op, dims, (x.q, "B T H K"), "HV K V", state=state, slots=slots, fresh=fresh)
    checks.check_dtype(op, (*state_dtypes(slots), *((torch.float64,) if impl == "reference" else ())), state=state)
    check_spacing(op, slots, state, impl)
    return impl, scale


def _bind(op: str, x: Inputs) -> tuple[dict[str, int], str | None, float]:
    """Validate the arguments of a call on whole sequences; return sizes, the result of `resolve_impl`, the scale."""
    dims = checks.bind_shapes(
        op, {}, q=(x.q, "B T H K"), k=(x.k, "B T H K"), v=(x.v, "B T HV V"), g=(x.g, "B T HV"), beta=(x.beta, "B T HV")
    )
    if dims["B"] < 1 or dims["T"] < 1:
        raise ValueError(f"{op}: B and T must be at least 1, got B={dims['B']} and T={dims['T']}")
    sequences = checks.check_cu_seqlens(op, x.cu_seqlens, dims["B"], dims["T"])
    if x.cu_seqlens is not None and x.cu_seqlens.device != x.q.device:
        raise ValueError(f"{op}: cu_seqlens is on {x.cu_seqlens.device}, expected {x.q.device} like the other tensors")
    dims["N"] = dims["B"] if sequences is None else sequences
    checks.bind_shapes(op, dims, q=(x.q, "B T H K"), initial_state=(x.initial_state, "N HV K V?"))
    if x.write_chunk < CHUNK or x.write_chunk % CHUNK:
        raise ValueError(f"{op}: write_chunk must be a multiple of {CHUNK}, got {x.write_chunk}")
    if x.writes is not None:
        dims["slots"] = chunk_slots(1, dims["T"], x.write_chunk, x.cu_seqlens)
        checks.bind_shapes(op, dims, q=(x.q, "B T H K"), writes=(x.writes, "B slots HV"))
        checks.check_dtype(op, (*_INPUTS, torch.float64), writes=x.writes)
    impl = resolve_impl(op, x.impl, x.q, None if op == "recurrent_gated_delta_rule" else GLUON)
    _check_sizes(op, dims, impl)
    _check_dtypes(op, x.q, x.k, x.v, x.g, x.beta, x.initial_state, impl)
    return dims, impl, dims["K"] ** -0.5 if x.scale is None else checks.check_scale(op, x.scale)


@Checked
def _check_step(q, k, v, g, beta, state, slots, scale, impl) -> tuple[str | None, float]:
    """Validate the arguments of a decoding step; return the result of `resolve_impl`, and the scale."""
    op = "gated_delta_rule_step"
    dims = checks.bind_shapes(
        op, {}, q=(q, "B H K"), k=(k, "B H K"), v=(v, "B HV V"), g=(g, "B HV"), beta=(beta, "B HV"),
        state=(state, f"{first_axis(slots)} HV K V"), slots=(slots, "B?"),
    )  # fmt: skip
    impl = resolve_impl(op, impl, q, GLUON_STEP)
    _check_sizes(op, dims, impl)
    if impl == "gluon":
        GLUON_STEP.require(op, q.device, q.dtype, step_limit(dims["K"], dims["V"]))
    _check_dtypes(op, q, k, v, g, beta, state, impl, slots)
    check_written(op, slots, state=state)
    check_spacing(op, slots, state, impl)
    return impl, dims["K"] ** -0.5 if scale is None else checks.check_scale(op, scale)


def _check_sizes(op: str, dims: dict[str, int], impl: str | None) -> None:
    checks.check_multiple(op, "HV", dims["HV"], "H", dims["H"])
    if impl != "reference":
        for letter in ("K", "V"):
            if dims[letter] not in HEAD_SIZES:
                raise ValueError(
                    f"{op}: impl={impl or 'triton'!r} takes {letter} in {{64, 128, 256}}, got {letter}={dims[letter]}; "
                    "pad the heads, or pass impl='reference'"
                )


def _check_dtypes(op, q, k, v, g, beta, state, impl: str | None, slots: Tensor | None = None) -> None:
    wide = (torch.float64,) if impl == "reference" else ()
    checks.check_dtype(op, (*_INPUTS, *wide), q=q, g=g, beta=beta)
    checks.check_same_dtype(op, q=q, k=k, v=v)
    if state is not None:
        checks.check_dtype(op, (*state_dtypes(slots), *wide), state=state)
