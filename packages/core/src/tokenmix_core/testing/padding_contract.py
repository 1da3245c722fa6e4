"""Tests of packed operations with padding after the last boundary; `OpContract` inherits them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tokenmix_core.testing.calls import KernelCase
from tokenmix_core.testing.closeness import relative_error


class PaddingTests:
    """Part of `OpContract`: tokens after the last boundary have no influence; their results and gradients are zero."""

    def test_padding_after_the_last_boundary_has_no_influence(self, padded_call, device, override):
        """Turn the last documents into padding that is NaN: its results must be zero, all other results unchanged."""
        here: Any = self
        impl, name, dtype = padded_call
        case = KernelCase(here.packed[name]) if dtype is None else here.kernels[name]
        if case.patch is not None:
            case.patch(override)
        form = case.form or next(iter(here.forms))
        given = {} if dtype is None else {"dtype": dtype, "device": device}
        tensors, options = here.make(**given, **case.sizes)
        boundaries = options["cu_seqlens"]
        T = int(boundaries[-1])
        last = max((int(x) for x in boundaries if 0 < x <= T // 2), default=max(int(x) for x in boundaries if x < T))
        shortened, ends = boundaries.clamp(max=last), boundaries[1:] <= last

        def pad(x: Tensor, value: float) -> Tensor:
            after = torch.full_like(x[:, last:], value if x.is_floating_point() else 0)
            return torch.cat([x[:, :last], after], 1)

        def of_tokens(name: str) -> bool:
            return (name[1:] if name[1:] in here.tokens else name) in here.tokens or name in outputs

        def upstream_with(value: float) -> Any:
            if upstream is None:
                return None
            return {
                n: x * ends.to(x).view(-1, *[1] * (x.dim() - 1)) if n in here._ends() else pad(x, value)
                for n, x in upstream.items()
            }

        wanted, upstream = here._found(here._function(form, options, impl), tensors)
        outputs = wanted.keys() - {*here._ends(), *(f"d{n}" for n in tensors)}
        wanted, _ = here._found(here._function(form, options, impl), tensors, upstream_with(0))
        padding = {n: pad(x.detach(), torch.nan) if n in here.tokens else x for n, x in tensors.items()}
        options = {n: pad(x, 0) if n in here.tokens else x for n, x in options.items()} | {"cu_seqlens": shortened}
        got, _ = here._found(here._function(form, options, impl), padding, upstream_with(torch.nan))
        assert got.keys() == wanted.keys()
        for name, x in wanted.items():
            if name in here._ends() or name.removeprefix("d") == (here.state or [None])[0]:
                assert relative_error(got[name][ends], x[ends]) < 1e-5, name
            elif of_tokens(name):
                assert not got[name][:, last:].any(), f"{name} of the padding is not zero"
                assert relative_error(got[name][:, :last], x[:, :last]) < 1e-5, name
            else:
                assert relative_error(got[name], x) < 1e-5, name
