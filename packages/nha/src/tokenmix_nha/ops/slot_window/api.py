"""The public functions of slot-window attention: they check arguments, prepend the carried window, select kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tokenmix_core.kernels import Checked
from tokenmix_core.ops import (
    Impl,
    ScanOutput,
    at_slots,
    bind_shapes,
    check_cu_seqlens,
    check_dtype,
    check_same_dtype,
    check_written,
    exportable,
    is_exporting,
    refuse_gradients,
    resolve_impl,
)
from tokenmix_nha.ops.forget_gates.api import check_normalizer, log_forget_gates_reference
from tokenmix_nha.ops.slot_window import reference
from tokenmix_nha.ops.slot_window.checks import check_alignment, check_rest, check_state, logit_scale
from tokenmix_nha.ops.slot_window.plan import GLUON, limit
from tokenmix_nha.ops.slot_window.state import SlotWindowState, last_tokens, prepend
from tokenmix_nha.ops.slot_window.tuning import slot_tile
from tokenmix_nha.ops.slot_window.types import Inputs


def slot_window_attention(
    q: Float[Tensor, "B T HQ K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H V"],
    f: Float[Tensor, "B T H M"],
    *,
    window: int,
    q_slots: Float[Tensor, "B T HQ K"] | None = None,
    k_slots: Float[Tensor, "B T H K"] | None = None,
    scale: float | None = None,
    initial_state: SlotWindowState | None = None,
    cu_seqlens: Int[Tensor, "N_plus_1"] | None = None,
    output_final_state: bool = True,
    impl: Impl | None = None,
) -> ScanOutput:
    r"""Attend to M memory slots and the last `window` tokens under one softmax (Native Hybrid Attention, eq. 1–4).

    A token enters the slots when it leaves the window, with its own gate :math:`\alpha_j = e^{f_j} \in [0, 1]^M`. The
    query at position t, with window w, sees the slots, which contain the tokens :math:`j \le t - w`, and the tokens
    :math:`t - w < j \le t` themselves:

    .. math:: S^K \leftarrow \mathrm{Diag}(\alpha_j) S^K + (1 - \alpha_j) \otimes k_j, \qquad
        S^V \leftarrow \mathrm{Diag}(\alpha_j) S^V + (1 - \alpha_j) \otimes v_j

    .. math:: o_t = \mathrm{softmax}(\text{scale} \cdot q_t [S^K; k_{t-w+1} \ldots k_t]^\top)
        [S^V; v_{t-w+1} \ldots v_t]

    Slots start at zero: before any token enters them, their logit is 0 and their value 0. `window=0` is gated slot
    attention, whose slots include token t; a window of T or more is full attention with M additional zero keys. Query
    head h reads head h // (HQ / H) of k, v and f. Differentiable in every tensor argument, including the state, and
    through both results.

    Args:
        q: `[B, T, HQ, K]`; HQ is a multiple of H.
        k, v: `[B, T, H, K]`, `[B, T, H, V]`. q, k, v, q_slots and k_slots share one dtype: bfloat16, float16 or float32
            (the reference also float64).
        f: `[B, T, H, M]`, natural log of the gates, ≤ 0, in any of these dtypes. Kernels treat gates below 2⁻¹⁴ as
            2⁻¹⁴, or for float32 q those below 2⁻²⁸ as 2⁻²⁸.
        window: number w of last tokens that a query sees exactly, itself included; an integer ≥ 0 that may change
            between calls.
        q_slots, k_slots: q and k for the slots, if those for the window are rotated; None stands for q and k.
        scale: factor of the logits; None stands for K ** −0.5.
        initial_state: the `final_state` of the call on the preceding tokens. Tokens that have entered the slots stay in
            them even if `window` is larger than in that call.
        cu_seqlens: `[N + 1]` int32 or int64, the boundaries of N sequences packed into one row (B = 1).
        output_final_state: if False, the final state is None, which saves gathering its ring buffer.
        impl: "gluon" (Hopper kernels: bfloat16, K and V of 64 or 128, M of 16, 32 or 64), "triton" (K and V of 64 or
            128, M of 16, 32, 64 or 128), "reference" (any size and device), or None for the fastest one available:
            Gluon on Hopper, Triton on other CUDA tensors, else the reference. With "gluon", single kernels still are
            Triton's if these are faster; `tokenmix_core.ops.explain` names all kernels. For a window of T or more
            without an initial state, core's fastest attention runs, unless `impl` is "reference".

    Returns:
        ScanOutput: o `[B, T, HQ, V]` in q's dtype, and a `SlotWindowState` whose ring buffer contains `window` tokens,
            or all tokens if there are fewer.

    Raises:
        ValueError: shapes, dtypes, devices, head counts, window or cu_seqlens do not fit; the message names the
            argument with its actual and its expected value.
    """
    op = "slot_window_attention"
    if initial_state is not None and not isinstance(initial_state, SlotWindowState):
        raise ValueError(f"{op}: the state must be a SlotWindowState, got {type(initial_state).__name__}")
    tensors = q, k, v, f, q_slots, k_slots, cu_seqlens
    dims, backend, factor = _check(op, *tensors, window, scale, impl, *(() if initial_state is None else initial_state))

    before, start, slots_k, slots_v = 0, None, None, None
    if initial_state is not None:
        slots_k, slots_v, before = initial_state.slots_k, initial_state.slots_v, initial_state.window
        k, v, f, k_slots, start = prepend(initial_state, k, v, f, k_slots, cu_seqlens)
    x = Inputs(
        q=q, k=k, v=v, f=f, q_slots=q_slots, k_slots=k_slots, slots_k=slots_k, slots_v=slots_v, start=start,
        cu_seqlens=cu_seqlens, before=before, window=window, scale=factor, impl=backend,
    )  # fmt: skip
    exported = backend == "reference" and is_exporting()
    if initial_state is None and not exported and window >= dims["T"]:
        # no token leaves the window, so that the slots stay zero
        from tokenmix_nha.ops.slot_window.prefix import zero_prefix_attention

        o = zero_prefix_attention(q, k, v, cu_seqlens, slots=dims["M"], scale=factor, impl=backend)
        slots_k, slots_v = _zero_slots(dims, q) if output_final_state else (None, None)
    elif backend != "reference":
        from tokenmix_nha.ops.slot_window.autograd import slot_window_attention_kernels

        o, slots_k, slots_v = slot_window_attention_kernels(*x)
    else:
        o, slots_k, slots_v = _reference(x)
    if not output_final_state:
        return ScanOutput(o, None)
    *rings, length = last_tokens(k, v, f, k_slots, window=window, before=before, start=start, cu_seqlens=cu_seqlens)
    return ScanOutput(o, SlotWindowState(slots_k, slots_v, *rings, length))


def slot_window_attention_prefill(
    q: Float[Tensor, "B T HQ K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H V"],
    f: Float[Tensor, "B T H M"],
    state: SlotWindowState,
    *,
    slots: Int[Tensor, "N"],
    fresh: Bool[Tensor, "N"] | None = None,
    q_slots: Float[Tensor, "B T HQ K"] | None = None,
    k_slots: Float[Tensor, "B T H K"] | None = None,
    scale: float | None = None,
    cu_seqlens: Int[Tensor, "N_plus_1"] | None = None,
    impl: Impl | None = None,
) -> Float[Tensor, "B T HQ V"]:
    """Compute `slot_window_attention` from and into slots of a pool of states. Not differentiable.

    The window is the size of the state's ring buffer. The kernels read the carried windows from the ring buffers, and
    overwrite only the entries of tokens that have entered the slots.

    Args:
        q, k, v, f, q_slots, k_slots, scale, cu_seqlens: as for `slot_window_attention`.
        state: pools of states, each `[S, ...]` instead of `[N, ...]`. The elements of a slot are contiguous; slots may
            be any distance apart.
        slots: int32 or int64 `[N]`, the slot of each sequence, which is read and overwritten. A sequence with a
            negative slot starts from an empty state, and its final state is dropped.
        fresh: bool `[N]`, True for a sequence that starts from an empty state and does not read its slot; None if none
            does.
        impl: as for `slot_window_attention`.

    Returns:
        o `[B, T, HQ, V]` in q's dtype.

    Raises:
        ValueError: as for `slot_window_attention`; or gradients are required, a slot does not exist, or two sequences
            share one.
    """
    op = "slot_window_attention_prefill"
    tensors = dict(q=q, k=k, v=v, f=f, q_slots=q_slots, k_slots=k_slots)
    refuse_gradients(op, **tensors)
    if not isinstance(state, SlotWindowState):
        raise ValueError(f"{op}: the state must be a SlotWindowState, got {type(state).__name__}")
    backend, factor = _check_prefill(op, *tensors.values(), cu_seqlens, scale, impl, slots, fresh, *state)
    if backend != "reference":
        from tokenmix_nha.ops.slot_window.autograd import prefill

        return prefill(*tensors.values(), cu_seqlens, *state, slots, fresh, factor, backend)
    held = state.at(slots, fresh)
    options = {"initial_state": held, "cu_seqlens": cu_seqlens, "scale": factor, "impl": backend}
    with torch.no_grad():
        o, after = slot_window_attention(**tensors, window=state.window, **options)
        state.put(slots, after.reserve(state.window))
    return o


@torch.no_grad()
def slot_window_attention_step(
    q: Float[Tensor, "B HQ K"],
    k: Float[Tensor, "B H K"],
    v: Float[Tensor, "B H V"],
    f: Float[Tensor, "B H M"],
    state: SlotWindowState,
    *,
    slots: Int[Tensor, "B"] | None = None,
    q_slots: Float[Tensor, "B HQ K"] | None = None,
    k_slots: Float[Tensor, "B H K"] | None = None,
    scale: float | None = None,
    normalizer: float | None = None,
    impl: Impl | None = None,
) -> Float[Tensor, "B HQ V"]:
    """Run one decoding step of `slot_window_attention`; the window is the size of the state's ring. Updates `state`.

    The oldest token in the ring buffer enters the slots, the new token takes its entry, and the query sees slots and
    ring buffer. Memory and time do not depend on the number of earlier tokens. Not differentiable.

    Args:
        q, k, v, f, q_slots, k_slots: one token of each sequence, as for `slot_window_attention` without T.
        state: `SlotWindowState.zeros`, or a final state after `reserve(window)`; its contiguous tensors are
            overwritten.
        slots: int32 or int64 `[B]`; row n then reads and overwrites slot `slots[n]` of the pools in `state`, each
            `[S, ...]`, which a prefill has written. The output of a row with a negative slot, padding, is zero.
        scale: the same as for `slot_window_attention`.
        normalizer: τ if f contains logits, from which log-gates are computed as log σ(f) / τ (`log_forget_gates`); None
            if f contains log-gates.
        impl: the same as for `slot_window_attention`, but not "gluon": there is no Gluon kernel for one token.

    Returns:
        o `[B, HQ, V]` in q's dtype.

    Raises:
        ValueError: the same reasons as for `slot_window_attention`.
    """
    op = "slot_window_attention_step"
    token = dict(q=q, k=k, v=v, f=f, q_slots=q_slots, k_slots=k_slots)
    dims = bind_shapes(
        op, {}, q=(q, "B HQ K"), k=(k, "B H K"), v=(v, "B H V"), f=(f, "B H M"), q_slots=(q_slots, "B HQ K?"),
        k_slots=(k_slots, "B H K?"),
    )  # fmt: skip
    backend = resolve_impl(op, impl, q)
    if slots is None:
        dims["N"] = dims["B"]
    bind_shapes(op, dims, q=(q, "B HQ K"), slots=(slots, "B?"))
    check_rest(op, backend, dims, **token)
    if normalizer is not None:
        check_normalizer(op, normalizer)
    check_state(op, dims, q, f if normalizer is None else None, k_slots, state, "N" if slots is None else "S")
    check_written(op, slots, **_present(state))
    check_same_dtype(op, k=k, **{"state.k": state.k, "state.v": state.v})
    factor = logit_scale(op, dims, scale)
    if backend != "reference":
        from tokenmix_nha.ops.slot_window.step import step_triton

        return step_triton(**token, state=state, scale=factor, normalizer=normalizer, slots=slots)
    if normalizer is not None:
        token["f"] = log_forget_gates_reference(f, normalizer)

    def run(q, k, v, f, q_slots, k_slots, *held):
        return reference.step_reference(q, k, v, f, q_slots, k_slots, _state_of(held, state), scale=factor)

    return at_slots(run, slots, tuple(token.values()), tuple(_present(state).values()))


@Checked
def _check(op, q, k, v, f, q_slots, k_slots, cu_seqlens, window, scale, impl, *state) -> tuple[dict, str | None, float]:
    """Validate a call on whole sequences; return its sizes, the implementation to use, and the scale."""
    if isinstance(window, bool) or not isinstance(window, int) or window < 0:
        raise ValueError(f"{op}: window must be an integer of at least 0, got {window!r}")
    dims = bind_shapes(
        op, {}, q=(q, "B T HQ K"), k=(k, "B T H K"), v=(v, "B T H V"), f=(f, "B T H M"), q_slots=(q_slots, "B T HQ K?"),
        k_slots=(k_slots, "B T H K?"),
    )  # fmt: skip
    backend = resolve_impl(op, impl, q, GLUON)
    if dims["T"] < 1:
        raise ValueError(f"{op}: q must hold at least one token, got T = {dims['T']}")
    sequences = check_cu_seqlens(op, cu_seqlens, dims["B"], dims["T"])
    dims["N"] = dims["B"] if sequences is None else sequences
    # pass q again: the check compares the device of cu_seqlens with that of the first tensor
    bind_shapes(op, dims, q=(q, "B T HQ K"), cu_seqlens=(cu_seqlens, "_?"))
    check_rest(op, backend, dims, q=q, k=k, v=v, f=f, q_slots=q_slots, k_slots=k_slots)
    if backend == "gluon":
        slots = slot_tile(dims["M"], q.dtype, k_slots is not None, dims["HQ"] // dims["H"])
        GLUON.require(op, q.device, q.dtype, limit(slots, dims["K"], dims["V"]))
    if state:
        check_state(op, dims, q, f, k_slots, SlotWindowState(*state))
    return dims, backend, logit_scale(op, dims, scale)


@Checked
def _check_prefill(
    op, q, k, v, f, q_slots, k_slots, cu_seqlens, scale, impl, slots, fresh, *state
) -> tuple[str | None, float]:  # fmt: skip
    """Validate a call on whole sequences in slots; return the implementation to use, and the scale."""
    held = SlotWindowState(*state)
    dims, backend, factor = _check(op, q, k, v, f, q_slots, k_slots, cu_seqlens, held.window, scale, impl)
    bind_shapes(op, dims, q=(q, "B T HQ K"), slots=(slots, "N"), fresh=(fresh, "N?"))
    check_dtype(op, (torch.bool,), fresh=fresh)
    check_state(op, {name: size for name, size in dims.items() if name != "N"}, q, f, k_slots, held, "S")
    check_written(op, slots, **_present(held))
    if backend != "reference":
        check_alignment(op, held)
    return backend, factor


def _present(state: SlotWindowState) -> dict[str, Tensor]:
    """Return the tensors of a state by name."""
    return {f"state.{name}": x for name, x in state._asdict().items() if x is not None}


def _state_of(tensors: Sequence[Tensor], like: SlotWindowState) -> SlotWindowState:
    """Return the state with these tensors, which has None where `like` has it."""
    given = iter(tensors)
    return SlotWindowState._make(None if x is None else next(given) for x in like)


def _shapes(q, v, slots_k, slots_v, **_) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(*q.shape[:3], v.shape[3]), torch.empty_like(slots_k), torch.empty_like(slots_v)


_CHUNK_REFERENCE = exportable(reference.chunk_reference, _shapes)


def _reference(x: Inputs):
    """Return o and the final slots, computed chunkwise in eager PyTorch; packed sequences run one after another."""
    q, k, v, f, slots_k, slots_v, start = x.q, x.k, x.v, x.f, x.slots_k, x.slots_v, x.start
    q_slots, k_slots = (q, k) if x.q_slots is None or x.k_slots is None else (x.q_slots, x.k_slots)
    sequences = q.shape[0] if x.cu_seqlens is None else len(x.cu_seqlens) - 1
    if slots_k is None or slots_v is None:
        dims = {"N": sequences, "H": k.shape[2], "M": f.shape[3], "K": k.shape[3], "V": v.shape[3]}
        slots_k, slots_v = _zero_slots(dims, q)
    if start is None:
        start = torch.zeros(sequences, dtype=torch.int32, device=q.device)
    options = {"window": x.window, "scale": x.scale}
    if x.cu_seqlens is None:
        return _CHUNK_REFERENCE(
            q=q, k=k, v=v, f=f, q_slots=q_slots, k_slots=k_slots, slots_k=slots_k, slots_v=slots_v, start=start,
            **options,
        )  # fmt: skip
    outputs = []
    for n, (a, b) in enumerate(zip(x.cu_seqlens.tolist(), x.cu_seqlens.tolist()[1:], strict=False)):
        old, new, own = slice(a + n * x.before, b + (n + 1) * x.before), slice(a, b), slice(n, n + 1)
        if a == b and not x.before:
            outputs.append((v.new_zeros(1, 0, q.shape[2], v.shape[3]), slots_k[own], slots_v[own]))
            continue
        outputs.append(
            reference.chunk_reference(
                q=q[:, new], k=k[:, old], v=v[:, old], f=f[:, old], q_slots=q_slots[:, new], k_slots=k_slots[:, old],
                slots_k=slots_k[own], slots_v=slots_v[own], start=start[own], **options,
            )
        )  # fmt: skip
    parts, slots_k, slots_v = zip(*outputs, strict=True)
    o = torch.cat(parts, 1)
    padding = v.new_zeros(1, q.shape[1] - o.shape[1], *o.shape[2:])
    return torch.cat((o, padding), 1), torch.cat(slots_k), torch.cat(slots_v)


def _zero_slots(dims: dict[str, int], q: Tensor) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(q.dtype, torch.float32)
    shape = (dims["N"], dims["H"], dims["M"])
    return q.new_zeros(*shape, dims["K"], dtype=wide), q.new_zeros(*shape, dims["V"], dtype=wide)
