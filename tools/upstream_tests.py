"""A pytest plugin with which FLA's and mamba_ssm's own tests call our operations; nox loads it.

In a test of a chunked operation, the recurrent operation with which it compares is not replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from triton.runtime.autotuner import Autotuner

from tokenmix_core.integrations import fla
from tokenmix_core.ops import ssd_step
from tokenmix_nha import fla as nha_fla

_autotuner = Autotuner.__init__


def _with_known_keys(self, fn, arg_names, configs, key, *args, **options) -> None:
    """Drop keys that are not arguments of the kernel: FLA has some, which Triton 3.9 rejects and 3.8 ignores."""
    _autotuner(self, fn, arg_names, configs, [name for name in key if name in arg_names], *args, **options)


# patch the autotuner before FLA is imported and decorates its kernels
Autotuner.__init__ = _with_known_keys


def selective_state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: Tensor | None = None,
) -> Tensor:
    """Compute mamba_ssm's decoding step by `ssd_step`, which has one Δ and one A per head.

    `state_batch_indices` is the slot of each row's state in the pool `state`.
    """
    if x.dim() != 3 or dt.stride(-1) or A.stride(-1) or A.stride(-2):
        pytest.skip("ssd_step has one step size and one decay per head")
    step = dt[..., 0].float() + (0 if dt_bias is None else dt_bias[..., 0])
    step = F.softplus(step) if dt_softplus else step
    # kernels need keys with at least 64 channels
    spare = max(0, 64 - state.shape[-1])
    # the tests have B and C in float32 beside 16-bit inputs
    wide = torch.promote_types(x.dtype, B.dtype)
    q, k = (F.pad(y, (0, spare)).to(wide) for y in (C, B))
    pool = F.pad(state.float(), (0, spare)).mT.contiguous()
    skip, slots = None if D is None else D[:, 0].to(wide), state_batch_indices
    o = ssd_step(q, k, x.to(wide), step * A[:, 0, 0], pool, dt=step, D=skip, slots=slots)
    state.copy_(pool.mT[..., : state.shape[-1]])
    return (o if z is None else o * F.silu(z.to(wide))).to(x.dtype)


_FLA = [
    *((fla, name) for name in ("chunk_gdn", "chunk_gated_delta_rule", "chunk_simple_gla")),
    *((fla, f"fused_recurrent_{name}") for name in ("gdn", "gated_delta_rule", "simple_gla")),
    *((nha_fla, name) for name in ("chunk_gla", "chunk_gsa", "fused_recurrent_gla", "fused_recurrent_gsa")),
]
OURS: dict[str, Callable] = {name: getattr(module, name) for module, name in _FLA}
OURS["selective_state_update"] = selective_state_update


def names_of(item: Any) -> list[str]:
    """Return the names that a test uses and that are replaced by ours."""
    used = [name for name in getattr(item, "function", names_of).__code__.co_names if name in OURS]
    chunked = any(part in item.name for part in ("chunk", "parallel"))
    return [name for name in used if not (chunked and name.startswith("fused_recurrent"))]


def pytest_collection_modifyitems(config: pytest.Config, items: list[Any]) -> None:
    """Deselect the tests that use none of our operations."""
    config.hook.pytest_deselected(items=[item for item in items if not names_of(item)])
    items[:] = [item for item in items if names_of(item)]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: Any) -> Generator[None, Any, Any]:
    """Replace the names in the test's module by our functions while the test runs."""
    with pytest.MonkeyPatch.context() as patch:
        for name in names_of(item):
            patch.setattr(item.module, name, OURS[name])
        torch.manual_seed(0)
        return (yield)
