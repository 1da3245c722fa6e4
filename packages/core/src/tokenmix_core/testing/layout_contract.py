"""Tests that an operation's results do not depend on the memory layout of its tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from tokenmix_core.testing.agreement import granted, upstream_like
from tokenmix_core.testing.closeness import relative_error
from tokenmix_core.testing.launch_spies import replays
from tokenmix_core.testing.layouts import LAYOUTS, Layout, Named, copies, laid_out

# layouts in which a call is repeated until the launch cache replays it; fewer on a CPU, to save time
OF_LAUNCH_CACHE = (*LAYOUTS,) if torch.cuda.is_available() else ("slices",)
# layouts in which calls other than `neighbours` are tested on a CPU
OF_FURTHER_CALLS = ("every second element", "expanded")
# layouts in which decoding steps, which write to their state, are tested
OF_STEPS = ("transposed", "every second element", "slices", "offset")


class LayoutTests:
    """Part of `OpContract`: results do not depend on the memory layout of arguments and gradients.

    Attributes:
        laid: sizes of further calls, by name, for example with other arguments; a CPU tests them in only two layouts.
        on_gpu: sizes of calls, by name, that only a GPU tests, because other kernels compute them there.
        impls: further implementations to test on a GPU.
        mutated: arguments that the operation overwrites; a call raises an error unless they are contiguous.
    """

    laid: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    on_gpu: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    impls: ClassVar[tuple[str | None, ...]] = (None, "gluon")
    mutated: ClassVar[tuple[str, ...]] = ()

    def laid_calls(self) -> list[tuple[str, str | None]]:
        """Return pairs to test: the name of a call, and an implementation."""
        here: Any = self
        gpu = torch.cuda.is_available()
        impls = [*here.eager, *(("triton",) if here.kernels else ()), *(self.impls if gpu and here.kernels else ())]
        names = ["neighbours", *self.laid, *(self.on_gpu if gpu else ())]
        return [(name, impl) for name in names for impl in dict.fromkeys(impls)]

    def layout_dtype(self) -> torch.dtype:
        """Return the dtype of the calls: 16 bits if kernels support it, so that `offset` shifts by 2 bytes."""
        here: Any = self
        if not here.kernels:
            return torch.float32
        half = torch.bfloat16 if torch.cuda.is_available() else torch.float16
        return half if torch.cuda.is_available() or "half" in here.dtypes else torch.float32

    def test_results_do_not_depend_on_layouts(self, form, laid_call, device):
        here: Any = self
        name, impl = laid_call
        sizes = here.neighbours if name == "neighbours" else {**self.laid, **self.on_gpu}[name]
        call = here.make(self.layout_dtype(), device, **sizes)
        try:
            compared = Compared(here, form, impl, call)
        except ValueError as error:
            # an implementation may refuse these sizes
            if impl in (None, "reference", "triton") or f"impl={impl!r}" not in str(error):
                raise
            pytest.skip(str(error))
        every = name == "neighbours" or torch.cuda.is_available()
        plain = Layout(copies, copies)
        with replays():
            # make the contiguous call first: the launch cache then contains it when it is repeated in each layout
            for _ in range(2 if every else 0):
                compared.run(plain)
            for title in LAYOUTS if every else OF_FURTHER_CALLS:
                for _ in range(3 if title in OF_LAUNCH_CACHE else 1):
                    compared.assert_independent(title, LAYOUTS[title])

    @pytest.mark.parametrize("layout", OF_STEPS)
    def test_steps_do_not_depend_on_layouts(self, impl, layout, device):
        here: Any = self
        step, sizes = here.step
        tensors, options = here.make(torch.float32, device, **sizes, T=3)
        token = here._token(tensors | options, 1)
        state = tensors[here.state[0]]
        wanted = state.clone()
        o = step(**token, state=wanted, impl=impl)
        change = LAYOUTS[layout].arguments
        token |= change({name: x for name, x in token.items() if isinstance(x, Tensor)})
        kept = change({"state": state})["state"]
        if not kept.is_contiguous():
            with pytest.raises(ValueError, match="state must be contiguous"):
                step(**token, state=kept, impl=impl)
            kept = state.clone()
        assert relative_error(step(**token, state=kept, impl=impl), o) < 2e-6
        assert relative_error(kept, wanted) < 2e-6


class Compared:
    """A call that is made in several layouts and compared with the call on contiguous copies of the same tensors."""

    def __init__(self, contract: Any, form: str, impl: str | None, call: Any) -> None:
        self.contract, self.form, self.impl = contract, form, impl
        self.tensors, self.options = copies(call.tensors), call.options
        self.eps = max((torch.finfo(x.dtype).eps for x in self.tensors.values() if x.is_floating_point()), default=0.0)
        self.upstream: dict[str, Tensor] = {}
        self.plain = self.run(Layout(copies, copies, alone=True))

    def assert_independent(self, title: str, layout: Layout) -> None:
        """Assert that this layout changes results and gradients by rounding errors at most."""
        wanted = self.run(layout, plain=True) if layout.repeats else self.plain
        try:
            got = self.run(layout)
        except ValueError as error:
            # an implementation named by `impl` may refuse a layout of arguments, but not of gradients
            if f"impl={self.impl!r} takes tensors that begin" not in str(error):
                raise
            layout = layout._replace(arguments=copies)
            wanted = self.run(layout, plain=True) if layout.repeats else self.plain
            got = self.run(layout)
        assert got.keys() <= wanted.keys()
        for name, x in got.items():
            where = f"{title}: {name}"
            if x.is_floating_point():
                # a kernel that misreads a tensor has an error of about 1; one that misreads one row in a thousand, .03
                assert relative_error(x, wanted[name]) <= 8 * granted(self.eps), where
            else:
                assert torch.equal(x, wanted[name]), where

    def run(self, layout: Layout, plain: bool = False) -> dict[str, Tensor]:
        """Return results and gradients by name.

        If `plain`, the call takes contiguous copies of the tensors in this layout.
        """
        change = copies if plain else dict
        written = {name: x.clone() for name, x in self.tensors.items() if name in self.contract.mutated}
        tensors = change(layout.arguments({n: x for n, x in self.tensors.items() if n not in written})) | written
        options = self.options if plain else laid_out(self.options, layout)
        differentiable = self.contract.differentiable
        leaves = {n: x.detach().requires_grad_(differentiable and x.is_floating_point()) for n, x in tensors.items()}
        results = self.contract._function(self.form, options, self.impl)(**leaves)._asdict()
        through = [name for name, x in results.items() if x.requires_grad]
        self.upstream = self.upstream or upstream_like(results)
        upstream = change(layout.gradients({name: self.upstream[name] for name in through})) if through else {}
        return results | self.gradients(leaves, results, upstream, layout.alone or torch.cuda.is_available())

    def gradients(self, leaves: Named, results: Named, upstream: Named, alone: bool) -> dict[str, Tensor]:
        """Return the gradients through all results together.

        With `alone` and several results, also return those through each result alone (on a CPU only the first).
        """
        names = [name for name, x in leaves.items() if x.requires_grad]
        single = [*upstream] if len(upstream) > 1 and alone else []
        found = {}
        for through in ([*upstream], *([name] for name in single[: None if torch.cuda.is_available() else 1])):
            if through:
                grads = torch.autograd.grad(
                    [results[name] for name in through], [leaves[name] for name in names],
                    [upstream[name] for name in through], retain_graph=True, materialize_grads=True,
                )  # fmt: skip
                title = " and ".join(through)
                found |= {f"d{name} through {title}": x for name, x in zip(names, grads, strict=True)}
        return found


def differently_laid(function: Callable, tensors: Named) -> None:
    """Assert that `function(**tensors)`, a dict of tensors, is close to equal in all layouts of `OF_STEPS`."""
    wanted = function(**copies(tensors))
    for title in OF_STEPS:
        got = function(**LAYOUTS[title].arguments(tensors))
        for name, x in wanted.items():
            torch.testing.assert_close(got[name], x, msg=lambda text, where=f"{title}: {name}": f"{where}: {text}")
