"""Our kernels under flash-linear-attention's names and signatures: code written for FLA only changes an import.

    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    from tokenmix_core.integrations.fla import chunk_gated_delta_rule

Signatures are those of fla-core 0.6, with `head_first` of older versions and, at the end, our `impl`. Options that only
tune FLA's kernels are accepted and ignored; options that our kernels do not support raise an error.
`transpose_state_layout`, the old name of `state_v_first`, works with a warning. FLA accepts float32 q and k with a
16-bit v; here they are rounded to v's dtype.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from tokenmix_core import ops
from tokenmix_core.integrations import fitting
from tokenmix_core.nn.dtypes import at_least_float32
from tokenmix_core.nn.permute import moved
from tokenmix_core.ops.checks import bind_shapes
from tokenmix_core.ops.types import Impl, ScanOutput

Result = tuple[Tensor, Tensor | None]
# options that tune FLA's kernels and never change results
_IGNORED = {"chunk_size"}


def chunk_gated_delta_rule(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T HV V"],
    g: Float[Tensor, "B T HV"],
    beta: Float[Tensor, "B T HV"],
    scale: float | None = None,
    initial_state: Float[Tensor, "N HV K V"] | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Int[Tensor, "N_plus_1"] | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: Any = None,
    *,
    use_gate_in_kernel: bool = False,
    A_log: Float[Tensor, "HV"] | None = None,
    dt_bias: Float[Tensor, "HV"] | None = None,
    head_first: bool = False,
    impl: Impl | None = None,
    **more: Any,
) -> Result:
    """Compute FLA's `chunk_gated_delta_rule` by `tokenmix_core.ops.chunk_gated_delta_rule`.

    Heads with K up to 256 and any V are padded or split to sizes that the kernels support.

    Args:
        q, k, v, g, beta, scale, cu_seqlens, impl: the same as for that operation.
        initial_state: states of any floating-point dtype.
        output_final_state: whether to return the state after each sequence, in float32, instead of None.
        use_qk_l2norm_in_kernel: whether to L2-normalise q and k.
        use_beta_sigmoid_in_kernel, allow_neg_eigval: whether to replace beta by its sigmoid; with both, by twice its
            sigmoid.
        state_v_first: whether states are `[N, HV, V, K]`.
        use_gate_in_kernel: whether to replace g by −exp(A_log) · softplus(g + dt_bias).
        head_first: whether q, k, v, g, beta and o are `[B, heads, T, ...]`.
        cu_seqlens_cpu, chunk_indices, and the keyword `chunk_size`: ignored.

    Returns:
        `(o, final_state)`.

    Raises:
        ValueError: `cp_context` is given, an option is unknown, or shapes or dtypes do not fit.
    """
    op = "chunk_gated_delta_rule"
    if cp_context is not None:
        raise ValueError(f"{op}: cp_context is not available, as each sequence is on one device")
    return _gated_delta_rule(
        op, ops.chunk_gated_delta_rule, q, k, v, g, beta, scale, initial_state, output_final_state,
        use_qk_l2norm_in_kernel, use_gate_in_kernel, A_log, dt_bias, use_beta_sigmoid_in_kernel, allow_neg_eigval,
        state_v_first, cu_seqlens, head_first, impl, more,
    )  # fmt: skip


chunk_gdn = chunk_gated_delta_rule


def fused_recurrent_gated_delta_rule(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T HV V"],
    g: Float[Tensor, "B T HV"] | None = None,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    beta: Float[Tensor, "B T HV"] | None = None,
    scale: float | None = None,
    initial_state: Float[Tensor, "N HV K V"] | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Float[Tensor, "HV"] | None = None,
    dt_bias: Float[Tensor, "HV"] | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Int[Tensor, "N_plus_1"] | None = None,
    *,
    head_first: bool = False,
    impl: Impl | None = None,
    **more: Any,
) -> Result:
    """Compute FLA's `fused_recurrent_gated_delta_rule` by `ops.recurrent_gated_delta_rule`, with gradients.

    Args:
        g: log decays; None for no decay.
        gk, gv: must be None, because here a state decays by one gate per head.
        beta: None stands for 1.

    Other arguments, results and errors are those of `chunk_gated_delta_rule`.
    """
    op = "fused_recurrent_gated_delta_rule"
    if gk is not None or gv is not None:
        name = "gk" if gk is not None else "gv"
        raise ValueError(
            f"{op}: {name} is not available: a state decays by one gate per head, g (and beta is a keyword)"
        )
    return _gated_delta_rule(
        op, ops.recurrent_gated_delta_rule, q, k, v, g, beta, scale, initial_state, output_final_state,
        use_qk_l2norm_in_kernel, use_gate_in_kernel, A_log, dt_bias, use_beta_sigmoid_in_kernel, allow_neg_eigval,
        state_v_first, cu_seqlens, head_first, impl, more,
    )  # fmt: skip


fused_recurrent_gdn = fused_recurrent_gated_delta_rule


def chunk_simple_gla(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T HV V"],
    g: Float[Tensor, "B T HV"] | None = None,
    g_gamma: Float[Tensor, "HV"] | None = None,
    scale: float | None = None,
    initial_state: Float[Tensor, "N HV K V"] | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Int[Tensor, "N_plus_1"] | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    *,
    head_first: bool = False,
    impl: Impl | None = None,
    **more: Any,
) -> Result:
    """Compute FLA's `chunk_simple_gla` by `tokenmix_core.ops.chunk_ssd`.

    Heads with K up to 256 and any V are padded or split to sizes that the kernels support.

    Args:
        q, k, v, cu_seqlens, impl: the same as for that operation; v may have a multiple of the heads of q and k.
        g, g_gamma: log decays per token, or per head; None for no decay.
        scale: factor of the outputs; None for K ** −0.5.
        initial_state, output_final_state, state_v_first, head_first: the same as for `chunk_gated_delta_rule`.
        cu_seqlens_cpu, and the keyword `chunk_size`: ignored.

    Returns:
        `(o, final_state)`.

    Raises:
        ValueError: both g and g_gamma are given, an option is unknown, or shapes or dtypes do not fit.
    """
    return _simple_gla(
        "chunk_simple_gla", ops.chunk_ssd, q, k, v, g, g_gamma, scale, initial_state, output_final_state, False,
        state_v_first, cu_seqlens, head_first, impl, more,
    )  # fmt: skip


def fused_recurrent_simple_gla(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T HV V"],
    g: Float[Tensor, "B T HV"] | None = None,
    g_gamma: Float[Tensor, "HV"] | None = None,
    scale: float | None = None,
    initial_state: Float[Tensor, "N HV K V"] | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Int[Tensor, "N_plus_1"] | None = None,
    *,
    head_first: bool = False,
    impl: Impl | None = None,
    **more: Any,
) -> Result:
    """Compute FLA's `fused_recurrent_simple_gla` by `tokenmix_core.ops.recurrent_ssd`.

    With `reverse`, each sequence is scanned from its last token to its first. Other arguments, results and errors are
    those of `chunk_simple_gla`.
    """
    return _simple_gla(
        "fused_recurrent_simple_gla", ops.recurrent_ssd, q, k, v, g, g_gamma, scale, initial_state, output_final_state,
        reverse, state_v_first, cu_seqlens, head_first, impl, more,
    )  # fmt: skip


def _simple_gla(
    op, run, q, k, v, g, g_gamma, scale, initial_state, output_final_state, reverse, state_v_first, cu_seqlens,
    head_first, impl, more,
) -> Result:  # fmt: skip
    state_v_first = state_layout(op, state_v_first, more)
    refuse_unknown(op, more)
    q, k, v, g = tokens_first(head_first, q, k, v, g)
    q, k = as_values(v, q, k)
    dims = bind_shapes(op, {}, q=(q, "B T H K"), v=(v, "B T HV V"), g=(g, "B T HV?"), g_gamma=(g_gamma, "HV?"))
    if g is not None and g_gamma is not None:
        raise ValueError(f"{op}: g and g_gamma exclude each other: give a decay per token or per head")
    if g is None:
        g = _constant(v, 0.0) if g_gamma is None else at_least_float32(g_gamma).expand(v.shape[:3])
    before = as_float32(initial_state, q, v_first=state_v_first)
    factor = dims["K"] ** -0.5 if scale is None else scale
    boundaries = cu_seqlens
    if reverse:
        (q, k, v, g), boundaries, before = reversed_tokens((q, k, v, g), cu_seqlens, before)
    out = fitting.ssd(run, q, k, v, g, scale=factor, initial_state=before, cu_seqlens=boundaries, impl=impl)
    if reverse:
        (o,), _, state = reversed_tokens((out.o,), cu_seqlens, out.final_state)
        out = ScanOutput(o, state)  # type: ignore[arg-type]
    return _result(out, output_final_state, state_v_first, head_first)


def tokens_first(head_first: bool, *tensors: Tensor | None) -> list[Any]:
    """Return the tensors, transposed if `head_first` so that the dimension of tokens precedes that of heads."""
    return [x.transpose(1, 2) if head_first and isinstance(x, Tensor) and x.dim() > 2 else x for x in tensors]


def refuse_unknown(op: str, more: dict[str, Any]) -> None:
    """Raise a ValueError if `more` has unknown options, because FLA itself would ignore them silently."""
    if unknown := sorted(set(more) - _IGNORED):
        raise ValueError(f"{op}: there is no option {', '.join(map(repr, unknown))}")


def state_layout(op: str, state_v_first: bool, more: dict[str, Any]) -> bool:
    """Return `state_v_first` or, if `more` has its old name `transpose_state_layout`, remove and return that value.

    The old name causes a warning, and a ValueError if `state_v_first` is True as well.
    """
    if "transpose_state_layout" not in more:
        return state_v_first
    if state_v_first:
        raise ValueError(f"{op}: give state_v_first or its old name transpose_state_layout, not both")
    warnings.warn(f"{op}: transpose_state_layout is now called state_v_first", DeprecationWarning, stacklevel=4)
    return more.pop("transpose_state_layout")


def as_values(v: Tensor, *tensors: Tensor) -> list[Tensor]:
    """Round float32 tensors to the dtype of v if it has 16 bits; FLA accepts such a mixture, our kernels do not."""
    half = isinstance(v, Tensor) and v.dtype in (torch.float16, torch.bfloat16)
    return [x.to(v.dtype) if half and isinstance(x, Tensor) and x.dtype == torch.float32 else x for x in tensors]


def reversed_tokens(
    tensors: tuple[Tensor, ...], cu_seqlens: Tensor | None, state: Tensor | None
) -> tuple[list[Tensor], Tensor | None, Tensor | None]:
    """Return tensors `[B, T, ...]` with the order of tokens reversed, and boundaries and states in the new order."""
    if cu_seqlens is None:
        return [x.flip(1) for x in tensors], None, state
    T = tensors[0].shape[1] if tensors else 1
    # padding stays behind the sequences, whose order is reversed
    source = (cu_seqlens[-1] - 1 - torch.arange(T, device=cu_seqlens.device)) % T
    flipped = [moved(x[0], source, source).unsqueeze(0) for x in tensors]
    return flipped, (cu_seqlens[-1] - cu_seqlens).flip(0), None if state is None else state.flip(0)


def as_float32(state: Any, q: Tensor, *, v_first: bool = False) -> Any:
    """Convert an initial state, transposed if `v_first`, to our layout and to float32 (float64 if q is float64)."""
    if not isinstance(state, Tensor) or not isinstance(q, Tensor):
        return state
    return (state.mT if v_first else state).to(torch.promote_types(q.dtype, torch.float32))


def _gated_delta_rule(
    op, run, q, k, v, g, beta, scale, initial_state, output_final_state, l2norm, gate, A_log, dt_bias, sigmoid, doubled,
    state_v_first, cu_seqlens, head_first, impl, more,
) -> Result:  # fmt: skip
    state_v_first = state_layout(op, state_v_first, more)
    refuse_unknown(op, more)
    q, k, v, g, beta = tokens_first(head_first, q, k, v, g, beta)
    q, k = as_values(v, q, k)
    bind_shapes(
        op, {}, q=(q, "B T H K"), v=(v, "B T HV V"), g=(g, "B T HV?"), beta=(beta, "B T HV?"), A_log=(A_log, "HV?"),
        dt_bias=(dt_bias, "HV?"),
    )  # fmt: skip
    if gate:
        g = _gate(op, g, A_log, dt_bias)
    elif A_log is not None or dt_bias is not None:
        raise ValueError(f"{op}: A_log and dt_bias require use_gate_in_kernel=True")
    if sigmoid:
        if beta is None:
            raise ValueError(f"{op}: use_beta_sigmoid_in_kernel=True needs beta")
        beta = (2.0 if doubled else 1.0) * at_least_float32(beta).sigmoid()
    elif doubled:
        raise ValueError(f"{op}: allow_neg_eigval=True requires use_beta_sigmoid_in_kernel=True")
    g = _constant(v, 0.0) if g is None else g
    beta = _constant(v, 1.0) if beta is None else beta
    before = as_float32(initial_state, q, v_first=state_v_first)
    out = fitting.delta_rule(
        run, q, k, v, g, beta, scale=scale, initial_state=before, cu_seqlens=cu_seqlens, qk_l2norm=l2norm, impl=impl
    )
    return _result(out, output_final_state, state_v_first, head_first)


def _gate(op: str, g: Tensor | None, A_log: Tensor | None, dt_bias: Tensor | None) -> Float[Tensor, "B T HV"]:
    if g is None or A_log is None:
        raise ValueError(f"{op}: use_gate_in_kernel=True needs g and A_log")
    g = at_least_float32(g)
    return -at_least_float32(A_log).exp() * F.softplus(g if dt_bias is None else g + dt_bias)


def _constant(v: Tensor, value: float) -> Float[Tensor, "B T HV"]:
    return v.new_full(v.shape[:3], value, dtype=torch.promote_types(v.dtype, torch.float32))


def _result(out: ScanOutput, output_final_state: bool, v_first: bool, head_first: bool) -> Result:
    state = out.final_state.mT if v_first else out.final_state
    return out.o.transpose(1, 2) if head_first else out.o, state if output_final_state else None
