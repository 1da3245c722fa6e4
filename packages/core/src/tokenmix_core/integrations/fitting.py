"""Run heads of any size on kernels that support a few head sizes: pad or split the heads, then join the outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from tokenmix_core.nn.head_padding import HeadFit
from tokenmix_core.ops.dispatch import resolve_impl, unless_gluon
from tokenmix_core.ops.gated_delta_rule.api import HEAD_SIZES as DELTA_SIZES
from tokenmix_core.ops.ssd.api import HEAD_SIZES as SSD_SIZES
from tokenmix_core.ops.types import Impl, ScanOutput


def fits(q: Tensor, v: Tensor, sizes: tuple[int, ...], impl: Impl | None) -> bool:
    """Return whether heads of these sizes need no fitting: kernels support them, or the reference computes the call."""
    return {q.shape[-1], v.shape[-1]} <= set(sizes) or resolve_impl("heads", unless_gluon(impl), q) == "reference"


def delta_rule(
    run: Callable[..., ScanOutput], q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, scale: float | None,
    initial_state: Tensor | None, impl: Impl | None, **options: Any,
) -> ScanOutput:  # fmt: skip
    """Call `run`, an implementation of the gated delta rule, with heads (K ≤ 256, any V) fitted to its sizes."""
    options |= {"scale": scale, "impl": impl}
    if fits(q, v, DELTA_SIZES, impl):
        return run(q, k, v, g, beta, initial_state=initial_state, **options)
    fit, heads = HeadFit(q.shape[-1], v.shape[-1], DELTA_SIZES), v.shape[2]
    options["scale"] = q.shape[-1] ** -0.5 if scale is None else scale
    before = None if initial_state is None else fit.states(initial_state)
    o, after = run(
        fit.keys(q), fit.keys(k), fit.values(v), fit.gates(g), fit.gates(beta), initial_state=before, **options
    )
    return ScanOutput(fit.outputs(o, heads), fit.whole_states(after, heads))


def ssd(
    run: Callable[..., ScanOutput], q: Tensor, k: Tensor, v: Tensor, g: Tensor, *, dt: Tensor | None = None,
    D: Tensor | None = None, initial_state: Tensor | None, impl: Impl | None, **options: Any,
) -> ScanOutput:  # fmt: skip
    """Call `run`, an implementation of SSD, with heads fitted to its supported sizes."""
    options |= {"impl": impl}
    if fits(q, v, SSD_SIZES, impl):
        return run(q, k, v, g, dt=dt, D=D, initial_state=initial_state, **options)
    fit, heads = HeadFit(q.shape[-1], v.shape[-1], SSD_SIZES), v.shape[2]
    before = None if initial_state is None else fit.states(initial_state)
    dt, D = (None if gate is None else fit.gates(gate) for gate in (dt, D))
    o, after = run(fit.keys(q), fit.keys(k), fit.values(v), fit.gates(g), dt=dt, D=D, initial_state=before, **options)
    return ScanOutput(fit.outputs(o, heads), fit.whole_states(after, heads))
