"""Tests for every operation; test classes inherit them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from tokenmix_core.kernels.launch import caching
from tokenmix_core.testing.agreement import assert_agrees, values_and_gradients
from tokenmix_core.testing.calls import Call, KernelCase, Results, Sizes
from tokenmix_core.testing.closeness import assert_within, relative_error
from tokenmix_core.testing.derivatives import DerivativeTests
from tokenmix_core.testing.launch_spies import grids, replays
from tokenmix_core.testing.layout_contract import LayoutTests
from tokenmix_core.testing.padding_contract import PaddingTests
from tokenmix_core.testing.refusals import RefusalTests
from tokenmix_core.testing.slot_contract import HALF, SlotTests
from tokenmix_core.testing.tracing import CountedGraphs

DTYPES = {"float32": torch.float32, "half": HALF}
# all checks of torch's `opcheck`
ALL_CHECKS = (
    "test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static",
    "test_aot_dispatch_dynamic",
)  # fmt: skip
# maps each attribute of a contract (which describes a property of the operation) to the tests of the property
PROPERTIES = {
    "cases": (
        "test_the_reference_is_the_definition",
        "test_function_transforms_give_what_autograd_gives",
        "test_only_the_reference_has_second_derivatives",
    ),
    "lengths": ("test_ragged_lengths_give_what_the_definition_gives",),
    "kernels": (
        "test_kernels_err_at_most_twice_as_much_as_the_reference",
        "test_bfloat16_in_the_interpreter_is_refused_by_name",
        "test_only_the_first_axis_of_a_grid_grows_with_tokens",
    ),
    "parts": ("test_parts_equal_the_whole",),
    "step": (
        "test_steps_equal_the_whole_and_write_to_the_state_they_are_given",
        "test_steps_do_not_depend_on_layouts",
        "test_a_meta_tensor_among_those_of_a_step_is_refused_by_name",
        "test_steps_in_slots_equal_steps_on_states",
    ),
    "malformed_steps": ("test_malformed_steps_are_refused_before_a_launch", "test_malformed_slots_are_refused"),
    "packed": ("test_packed_documents_equal_each_alone", "test_padding_after_the_last_boundary_has_no_influence"),
    "neighbours": ("test_a_row_does_not_depend_on_its_neighbours", "test_results_do_not_depend_on_layouts"),
    "operators": ("test_operators_pass_torchs_own_checks",),
    "traced": ("test_one_graph_serves_all_lengths",),
    "replayed": ("test_replayed_calls_give_what_calls_give",),
    "malformed": (
        "test_malformed_calls_are_refused_before_a_launch",
        "test_a_meta_tensor_among_real_ones_is_refused_by_name",
    ),
}

Malformed = Mapping[str, tuple[Any, str]]


class OpContract(DerivativeTests, LayoutTests, PaddingTests, RefusalTests, SlotTests):
    """Tests of an operation. A subclass `TestX(OpContract)` describes the operation's properties by attributes.

    Attributes:
        covers: the public functions that the tests cover.
        absent: maps the attribute of each missing property to the reason why the operation lacks the property.
        forms: the operation's public functions (such as the chunked and the recurrent one) by name, the tests' `form`.
            They take all arguments by name, and `impl`; `results` turns their return values into tensors by name.
        differentiable: whether results have gradients.
        eager: implementations that run on any device; they are compared with the definition in float64.
        tokens: arguments whose second axis is that of tokens.
        grows: further arguments whose second axis depends on the number of tokens.
        past: arguments among `tokens`, such as keys, of which a part of a split call also gets all earlier tokens.
        state: names of the argument for the initial state, and of the result that is the final state.
        final: names of the results that have one entry per sequence; by default the final state.
        shared: arguments without a batch axis.
        dtypes: names of the dtypes in which the kernels are tested.
        cases: sizes of the calls, by name, that are compared with the definition.
        lengths: values of T at which a chunk or tile ends or begins.
        kernels: `KernelCase`s or sizes of calls, by name, that are tested with the kernels.
        factor: maximum error of the kernels, as a multiple of the eager reference's error.
        floor: maps a result's name and the inputs' eps to an error that is always allowed, as in `assert_agrees`.
        long: two lengths at which the grids of the kernels are compared.
        parts: sizes of calls, by name, that are repeated with the tokens split into several parts.
        step: the function that computes one token and overwrites its argument `state`, and the sizes of a call that it
            repeats token by token.
        malformed_steps: like `malformed`, but for calls of the step function.
        packed: sizes of packed calls, by name; each includes an empty document and a document of one token.
        neighbours: sizes of a call with three batch rows.
        traced: sizes, except T, of a call that torch.compile traces.
        traced_lengths: the values of T for the traced call.
        replayed: sizes of a call that the launch cache replays.
        operators: a method that takes the device and yields the operation's torch custom ops, each with its arguments
            and, if not all checks of `opcheck` apply, the names of those that do.
        malformed: by case, invalid arguments (or a function that changes valid arguments) and words of the error
            message. The arguments replace those of a valid call with the sizes `valid`.
    """

    pytestmark = pytest.mark.operation

    covers: ClassVar[tuple[Callable, ...]] = ()
    absent: ClassVar[Mapping[str, str]] = {}
    forms: ClassVar[Mapping[str, Callable]] = {}
    differentiable: ClassVar[bool] = True
    eager: ClassVar[tuple[str | None, ...]] = ("reference",)
    tokens: ClassVar[tuple[str, ...]] = ()
    grows: ClassVar[tuple[str, ...]] = ()
    past: ClassVar[tuple[str, ...]] = ()
    state: ClassVar[Any] = None
    final: ClassVar[tuple[str, ...]] = ()
    shared: ClassVar[tuple[str, ...]] = ()
    dtypes: ClassVar[tuple[str, ...]] = ("float32", "half")
    cases: ClassVar[Mapping[str, Sizes]] = {}
    lengths: ClassVar[Sequence[int]] = ()
    kernels: ClassVar[Mapping[str, KernelCase]] = {}
    factor: ClassVar[float] = 2.0
    floor: ClassVar[Any] = None
    long: ClassVar[tuple[int, int]] = (4000, 12000)
    parts: ClassVar[Mapping[str, Sizes]] = {}
    step: ClassVar[Any] = None
    malformed_steps: ClassVar[Malformed] = {}
    packed: ClassVar[Mapping[str, Sizes]] = {}
    neighbours: ClassVar[Sizes] = {}
    traced: ClassVar[Sizes] = {}
    traced_lengths: ClassVar[tuple[int, int]] = (3, 5)
    replayed: ClassVar[Sizes] = {}
    valid: ClassVar[Sizes] = {}
    malformed: ClassVar[Malformed] = {}
    operators: ClassVar[Any] = None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name, tests in PROPERTIES.items():
            if bool(getattr(cls, name)) == (name in cls.absent):
                raise TypeError(f"{cls.__name__}: {name} must be described, or be named in absent with a reason")
            for test in tests if name in cls.absent else ():
                # None hides a test, because pytest does not collect it
                setattr(cls, test, None)

    # ---- the description ----

    def make(self, dtype: torch.dtype = torch.float64, device: str = "cpu", seed: int = 0, **sizes: Any) -> Call:
        """Return random arguments of a call; the subclass defines which `sizes` there are, T among them."""
        raise NotImplementedError

    def definition(self, **arguments: Any) -> Any:
        """Return the operation's results, computed from its equations token by token."""
        raise NotImplementedError

    @staticmethod
    def results(output: Any) -> dict[str, Tensor]:
        """Return an operation's output tensors by name, except those that are None."""
        if isinstance(output, Tensor):
            return {"y": output}
        return {name: x for name, x in output._asdict().items() if x is not None}

    def named(self, form: str, name: str) -> str | None:
        """Return the name of an argument in error messages of the function `form`; None if it lacks the argument."""
        return name

    def part(self, arguments: dict[str, Any], start: int, stop: int) -> dict[str, Any]:
        """Return the arguments of a call for only the tokens from `start` to `stop`."""
        begins = {name: 0 if name in self.past else start for name in self.tokens}
        return {name: x[:, begins[name] : stop] if name in begins else x for name, x in arguments.items()}

    def document(self, arguments: dict[str, Any], n: int, start: int, stop: int) -> dict[str, Any]:
        """Return the arguments of a call for only document n, whose tokens are packed from `start` to `stop`."""
        alone = {name: x[:, start:stop] if name in self.tokens else x for name, x in arguments.items()}
        del alone["cu_seqlens"]
        if self.state is not None and self.state[0] in alone:
            alone[self.state[0]] = alone[self.state[0]][n : n + 1]
        return alone

    def growing(self, arguments: dict[str, Any]) -> Iterator[tuple[Tensor, int]]:
        """Yield the tensors whose size depends on the number of tokens, each with the index of the axis of tokens."""
        for name in {*self.tokens, *self.grows} & arguments.keys():
            yield arguments[name], 1

    def assert_kernels_agree(self, kernels: Callable, reference: Callable, call: Call) -> None:
        """Assert that kernels err by at most `floor`, or `factor` times the error of the eager reference."""
        if self.differentiable:
            assert_agrees(kernels, reference, call.tensors, factor=self.factor, floor=self.floor)
            return
        wide = {name: x.double() if x.is_floating_point() else x for name, x in call.tensors.items()}
        exact, eager = (reference(**x)._asdict() for x in (wide, call.tensors))
        for name, x in kernels(**call.tensors)._asdict().items():
            if x.is_floating_point():
                floor = None if self.floor is None else self.floor(name, torch.finfo(x.dtype).eps)
                assert_within(name, x, exact[name], eager[name], factor=self.factor, floor=floor)
            else:
                assert torch.equal(x, eager[name]), name

    def kernel_dtype(self) -> torch.dtype:
        """Return the first of `dtypes`, the dtypes in which kernels are tested."""
        return DTYPES[self.dtypes[0]]

    # ---- the tests ----

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Parametrize the tests with the names of `forms`, implementations, and the cases in the class attributes."""
        packed = [n for n, x in self.kernels.items() if {"boundaries", "cu", "cu_seqlens"} & x.sizes.keys()]
        by_name = {
            "form": [*self.forms],
            "impl": ["reference", "triton"] if self.kernels else [*self.eager],
            "eager_impl": [*self.eager],
            "case": [*self.cases],
            "length": [*self.lengths],
            "cut_case": [*self.parts],
            "packed_case": [*self.packed],
            "prefill_patch": [None, *getattr(self, "prefill_patches", ())],
            "grid_case": [name for name in self.kernels if name not in packed],
            "padded_call": [
                *((impl, name, None) for impl in self.eager for name in self.packed),
                *(("triton", n, DTYPES[(self.kernels[n].dtypes or self.dtypes)[0]]) for n in packed),
            ],
            "bad": [*self.malformed],
            "bad_step": [*self.malformed_steps],
            "laid_call": self.laid_calls() if "laid_call" in metafunc.fixturenames else [],
            "kernel": [(name, dtype) for name, case in self.kernels.items() for dtype in case.dtypes or self.dtypes],
        }
        for name, values in by_name.items():
            if name in metafunc.fixturenames:
                ids = ["-".join(map(str, x)) if isinstance(x, tuple) else str(x) for x in values]
                metafunc.parametrize(name, values, ids=ids)

    def _function(self, form: str, options: Mapping[str, Any], impl: str | None) -> Callable:
        """Return a function that calls `forms[form]` with tensors and the given options, and returns `Results`."""
        return lambda **tensors: Results(self.results(self.forms[form](**tensors, **options, impl=impl)))

    def _found(self, function: Callable, tensors: Mapping[str, Tensor], upstream: Any = None) -> tuple[dict, Any]:
        """Return the values, with gradients if `differentiable`, and the upstream gradients (else None)."""
        if self.differentiable:
            return values_and_gradients(function, tensors, upstream)
        return function(**tensors)._asdict(), None

    def _assert_equal(self, got: Callable, wanted: Callable, tensors: Mapping[str, Tensor]) -> None:
        """Assert that two functions return values and gradients that differ by a relative error of at most 1e-10."""
        exact, upstream = self._found(wanted, tensors)
        found, _ = self._found(got, tensors, upstream)
        assert found.keys() == exact.keys()
        for name, x in exact.items():
            assert relative_error(found[name], x) < 1e-10, name

    def _assert_defined(self, form: str, impl: str | None, sizes: Sizes) -> None:
        tensors, options = self.make(**sizes)
        defined = lambda **x: Results(self.results(self.definition(**x, **options)))  # noqa: E731
        self._assert_equal(self._function(form, options, impl), defined, tensors)

    def test_the_reference_is_the_definition(self, form, eager_impl, case):
        self._assert_defined(form, eager_impl, self.cases[case])

    def test_ragged_lengths_give_what_the_definition_gives(self, form, eager_impl, length):
        self._assert_defined(form, eager_impl, {"T": length})

    def test_kernels_err_at_most_twice_as_much_as_the_reference(self, kernel, device, override):
        case, dtype = self.kernels[kernel[0]], DTYPES[kernel[1]]
        form = case.form or next(iter(self.forms))
        if case.patch is not None:
            case.patch(override)
        call = self.make(dtype, device, **case.sizes)
        kernels, reference = (self._function(form, call.options, impl) for impl in ("triton", "reference"))
        self.assert_kernels_agree(kernels, reference, call)

    def test_only_the_first_axis_of_a_grid_grows_with_tokens(self, grid_case, device, override):
        """Test that only the first axis grows, because on the other axes CUDA allows at most 65,535 programs."""
        if device != "cpu":
            pytest.skip("launches do nothing in this test, and on a GPU torch would read their results as indices")
        case = self.kernels[grid_case]
        if case.patch is not None:
            case.patch(override)
        found = []
        for T in self.long:
            tensors, options = self.make(DTYPES[self.dtypes[0]], device, **{**case.sizes, "T": T})
            function = self._function(case.form or next(iter(self.forms)), options, "triton")
            with caching(False), grids() as launches:
                self._found(function, tensors)
            found.append({(name, grid[1:]) for name, grid in launches})
        assert found[0]
        assert found[1] == found[0], found[1] ^ found[0]

    def test_parts_equal_the_whole(self, form, eager_impl, cut_case):
        tensors, options = self.make(**self.parts[cut_case])
        T = max(x.shape[1] for name, x in (tensors | options).items() if name in self.tokens)

        def by_parts(**given):
            outputs, state = [], {}
            for start, stop in pairwise((0, 1, T // 2, T)):
                part = self.part(given | options, start, stop) | state
                outputs.append(self.forms[form](**part, impl=eager_impl))
                if self.state is not None:
                    state = {self.state[0]: getattr(outputs[-1], self.state[1])}
            return self._joined(outputs)

        self._assert_equal(by_parts, self._function(form, options, eager_impl), tensors)

    def test_packed_documents_equal_each_alone(self, form, eager_impl, packed_case):
        tensors, options = self.make(**self.packed[packed_case])
        boundaries = options["cu_seqlens"].tolist()
        lengths = [stop - start for start, stop in pairwise(boundaries)]
        assert 0 in lengths
        assert 1 in lengths

        def apart(**given):
            outputs, ends = [], {name: [] for name in self._ends()}
            for n, (start, stop) in enumerate(pairwise(boundaries)):
                alone = self.document(given | options, n, start, stop)
                if start < stop:
                    outputs.append(self.forms[form](**alone, impl=eager_impl))
                for name, found in ends.items():
                    # an empty document has its initial state, by default zero, as final state
                    found.append(self.results(outputs[-1])[name] if start < stop else alone.get(self.state[0]))
            joined = self._joined(outputs)
            for name, found in ends.items():
                nothing = torch.zeros_like(joined[name])
                joined[name] = torch.cat([nothing if x is None else x for x in found])
            return joined

        self._assert_equal(self._function(form, options, eager_impl), apart, tensors)

    def _ends(self) -> tuple[str, ...]:
        """Return the names of results that have one entry per sequence instead of one per token."""
        return self.final or (() if self.state is None else (self.state[1],))

    def _joined(self, outputs: Sequence[Any]) -> Results:
        """Join the results of consecutive parts: concatenate along tokens, and take final states from the last part."""
        parts = [self.results(x) for x in outputs]
        ends = self._ends()
        return Results({n: x if n in ends else torch.cat([p[n] for p in parts], 1) for n, x in parts[-1].items()})

    def test_a_row_does_not_depend_on_its_neighbours(self, form, impl, device):
        tensors, options = self.make(DTYPES[self.dtypes[0]], device, **self.neighbours)
        beside = {n: x if n in self.shared else x.clone() for n, x in tensors.items()}
        for name, x in beside.items():
            if name not in self.shared and x.is_floating_point():
                assert len(x) == 3
                x[::2] = torch.nan
        function = self._function(form, options, impl)
        wanted, upstream = self._found(function, tensors)
        got, _ = self._found(function, beside, upstream)
        for name, x in wanted.items():
            if name.removeprefix("d") not in self.shared:
                assert torch.equal(got[name][1], x[1]), name

    def test_operators_pass_torchs_own_checks(self, device, monkeypatch):
        # otherwise torch fills uninitialised memory, but only in some of the calls that opcheck compares
        monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
        for op, arguments, *tests in self.operators(device):
            torch.library.opcheck(op, arguments, test_utils=tests or ALL_CHECKS)

    def test_one_graph_serves_all_lengths(self, form, device):
        torch.compiler.reset()
        graphs, function, results = CountedGraphs(values=True), self.forms[form], self.results
        impl = "triton" if self.kernels else self.eager[0]
        compiled = torch.compile(lambda **x: results(function(**x, impl=impl)), fullgraph=True, backend=graphs)
        for length in self.traced_lengths:
            tensors, options = self.make(torch.float32, device, **self.traced, T=length)

            def run(made=compiled, options=options, **x):
                for grown, axis in self.growing(x | options):
                    torch._dynamo.mark_dynamic(grown, axis)
                return Results(made(**x, **options))

            wanted, upstream = self._found(self._function(form, options, impl), tensors)
            got, _ = self._found(run, tensors, upstream)
            for name, x in wanted.items():
                torch.testing.assert_close(got[name], x, msg=lambda text, name=name: f"{name}: {text}")
        assert graphs.made == 1

    def test_replayed_calls_give_what_calls_give(self, form, device):
        calls = [self.make(DTYPES[self.dtypes[0]], device, seed, **self.replayed) for seed in range(3)]
        with replays() as made:
            for tensors, options in calls:
                function = self._function(form, options, "triton")
                got, upstream = self._found(function, tensors)
                with caching(False):
                    wanted, _ = self._found(function, tensors, upstream)
                assert all(torch.equal(got[name], x) for name, x in wanted.items())
        # the second and third call are replayed, and so are their backward passes
        assert made[0] >= (4 if self.differentiable else 2)

    def test_steps_equal_the_whole_and_write_to_the_state_they_are_given(self, impl, device):
        step, sizes = self.step
        tensors, options = self.make(torch.float32, device, **sizes, T=3)
        whole = next(iter(self.forms.values()))(**tensors, **options, impl="reference")
        taken, left = self.state
        state = tensors[taken].clone()
        for t in range(3):
            o = step(**self._token(tensors | options, t), state=state, impl=impl)
            assert relative_error(o, whole.o[:, t]) < 2e-6
        assert relative_error(state, getattr(whole, left)) < 2e-6

    def _token(self, arguments: dict[str, Any], t: int) -> dict[str, Any]:
        """Return the arguments, except the state, of the decoding step for token t."""
        rest = {name: x for name, x in arguments.items() if name != self.state[0]}
        return {name: x[:, t] if name in self.tokens else x for name, x in rest.items()}
