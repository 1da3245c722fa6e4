"""The contract of SSD, and what decays, layouts and head sizes add to it; kernels in the interpreter without a GPU."""

from __future__ import annotations

from functools import partial
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from tokenmix_core.ops import chunk_ssd, recurrent_ssd, ssd_prefill, ssd_step
from tokenmix_core.ops.ssd import tuning
from tokenmix_core.ops.ssd.span_states import final_state, initial_gradient, span_decay
from tokenmix_core.ops.types import ScanOutput
from tokenmix_core.testing.agreement import assert_agrees, gradients_through, values_and_gradients, with_scanned_sums
from tokenmix_core.testing.closeness import relative_error
from tokenmix_core.testing.operations import Call, KernelCase, OpContract
from tokenmix_core.testing.slot_contract import PrefillTests

PACKED = [0, 0, 5, 69, 69, 70]


def inputs(B=2, T=70, G=1, HV=2, K=16, V=16, N=None, dtype=torch.float64, device="cpu", seed=0, steps=False):
    """Random arguments by name; `N` adds an initial state of N sequences, `steps` Δ and D."""
    generator = torch.Generator(device).manual_seed(seed)
    randn = partial(torch.randn, generator=generator, device=device)
    gate = torch.float64 if dtype == torch.float64 else torch.float32
    x = {
        "q": (randn(B, T, G, K) * K**-0.5).to(dtype),
        "k": randn(B, T, G, K).to(dtype),
        "v": randn(B, T, HV, V).to(dtype),
        "g": -torch.rand(B, T, HV, generator=generator, device=device).to(gate) * 0.2,
    }
    if steps:
        x |= {"dt": 0.1 + torch.rand(B, T, HV, generator=generator, device=device).to(gate), "D": randn(HV).to(gate)}
    return x | ({"initial_state": randn(N, HV, K, V).to(gate)} if N else {})


def z(*shape: int, dtype=torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def segments(override):
    """Sequences in segments of one chunk."""
    original = tuning.ssd_plan
    override(tuning, ssd_plan=lambda *shape: original(*shape)._replace(segment=64))


def widened(override):
    """What kernels get wrong on a GPU, they get right in the interpreter."""
    from tokenmix_core.ops.ssd import autograd

    override(autograd, needs_widening=lambda x, *sizes: True)


class TestSSD(PrefillTests, OpContract):
    covers = (chunk_ssd, recurrent_ssd, ssd_prefill, ssd_step)
    prefill = (ssd_prefill, dict(G=2, HV=4, N=5, steps=True, boundaries=[0, 0, 5, 69, 200, 203]))
    prefill_patches: ClassVar = {"segments": segments, "widened heads": widened}
    forms: ClassVar = {"chunks": chunk_ssd, "tokens": recurrent_ssd}
    tokens = ("q", "k", "v", "g", "dt")
    state = ("initial_state", "final_state")
    shared = ("D",)
    cases: ClassVar = {
        "groups, steps, a skip and states": dict(T=70, G=2, HV=4, K=4, V=3, N=2, steps=True),
        "no state": dict(T=9, K=4, V=3),
    }
    lengths = (1, 63, 64, 65, 131)
    # what the interpreter can afford: each case takes a path of its own through the kernels
    kernels: ClassVar = {
        "ragged, with states": KernelCase(dict(N=2)),
        "steps and a skip": KernelCase(dict(N=2, steps=True)),
        # each dg is a sum of terms of either sign that may be near 0: a tolerance for a single one is meaningless
        "one token": KernelCase(dict(B=8, T=1, N=8)),
        "unequal head sizes, one group": KernelCase(dict(B=1, T=66, HV=4, V=32)),
        "packed": KernelCase(dict(G=2, HV=4, N=5, boundaries=PACKED)),
        "segments": KernelCase(dict(B=1, T=150, N=1), patch=segments),
        "segments with steps and a skip": KernelCase(dict(B=1, T=150, N=1, steps=True), patch=segments),
        "packed segments, groups": KernelCase(dict(N=5, boundaries=PACKED), patch=segments),
        "widened heads": KernelCase(dict(B=1, T=9, V=32, N=1, steps=True), patch=widened, dtypes=("float32",)),
        "widened heads, by tokens": KernelCase(
            dict(B=1, T=9, V=32, N=1, steps=True), "tokens", widened, dtypes=("float32",)
        ),
        "by tokens, packed": KernelCase(dict(N=3, steps=True, boundaries=[0, 0, 5, 9]), "tokens", dtypes=("float32",)),
    }
    parts: ClassVar = {"of a sequence": dict(T=70, K=4, V=4, steps=True)}
    step = (ssd_step, dict(N=2, steps=True))
    packed: ClassVar = {
        "with states": dict(K=4, V=4, N=5, steps=True, boundaries=PACKED),
        "without states": dict(K=4, V=4, boundaries=PACKED),
    }
    neighbours: ClassVar = dict(B=3, T=5, N=3, steps=True)
    laid: ClassVar = {"one row": dict(B=1, T=3, N=1, steps=True)}
    on_gpu: ClassVar = {"heads of 64": dict(B=2, T=150, K=128, V=64, N=2, steps=True)}
    traced: ClassVar = dict(B=1, N=1, steps=True)
    replayed: ClassVar = dict(B=1, T=3, N=1, steps=True)
    valid: ClassVar = dict(T=4)
    malformed: ClassVar = {
        "a missing axis": ({"q": z(4, 1, 16)}, r"q must have shape \[.*got \[4, 1, 16\]"),
        "a list": ({"v": [1.0]}, "v must be a tensor of shape .*, got list"),
        "no keys": ({"k": None}, "k must be a tensor .* got None"),
        "keys of another size": ({"k": z(2, 4, 1, 8)}, r"k must have shape \[.*got \[2, 4, 1, 8\]"),
        "keys of other groups": ({"k": z(2, 4, 2, 16)}, r"k must have shape \[.*got \[2, 4, 2, 16\]"),
        "values of another length": ({"v": z(2, 3, 2, 16)}, r"v must have shape \[.*got \[2, 3, 2, 16\]"),
        "gates per channel": ({"g": z(2, 4, 2, 1)}, "g must have shape"),
        "integer gates": ({"g": z(2, 4, 2, dtype=torch.int32)}, "g must be .*got int32"),
        "groups that do not divide": (dict.fromkeys("qk", z(2, 4, 3, 16)), "HV must be a multiple.*HV=2 and G=3"),
        "mixed dtypes": ({"k": z(2, 4, 1, 16, dtype=torch.float64)}, "share one dtype"),
        "integers": ({n: z(2, 4, h, 16).long() for n, h in zip("qkv", (1, 1, 2), strict=True)}, "must be bfloat16,"),
        "a state of other heads": ({"initial_state": z(2, 3, 16, 16)}, "initial_state must have"),
        "a half-precision state": ({"initial_state": z(2, 2, 16, 16, dtype=torch.float16)}, "must be float32"),
        "steps of other heads": ({"dt": z(2, 4, 1)}, "dt must have shape"),
        "a skip for each channel": ({"D": z(2, 16)}, "D must have shape"),
        "an integer skip": ({"D": z(2, dtype=torch.long)}, "D must be bfloat16, float16, float32"),
        "no tokens": (lambda x: x | {n: x[n][:, :0] for n in "qkvg"}, "at least one token, got T = 0"),
        "a scale that is no number": ({"scale": float("nan")}, "scale must be a finite number, got nan"),
        "packed rows": ({"cu_seqlens": torch.tensor([0, 4])}, "B = 1"),
        "boundaries in a list": ({"cu_seqlens": [0, 4]}, r"cu_seqlens must be a tensor of shape \[.*\], got list"),
        **{
            f"boundaries {values}": (lambda x, values=values: one_row(x, values), said)
            for values, said in (
                ([0, 5], r"rise from 0 to at most T = 4 .*got \[0, 5\]"),
                ([1, 4], r"got \[1, 4\]"),
                ([0, 4, 3, 4], r"without falling, got \[0, 4, 3, 4\]"),
                ([0], r"cu_seqlens must have shape \[N \+ 1\].*got \[1\]"),
                ([0.0, 4.0], "int32 or int64, got float32"),
            )
        },
        "a state for other documents": (
            lambda x: one_row(x, [0, 2, 4]) | {"initial_state": z(3, 2, 16, 16)}, "N=2.*got"
        ),
        "an unknown implementation": ({"impl": "fast"}, "impl must be .*got 'fast'"),
        "heads without a kernel": (
            lambda x: x | dict.fromkeys("qk", z(2, 4, 1, 24)) | {"impl": "triton"},
            "K in 16, 32, 64, 128, 256, got K=24; pad",
        ),
    }  # fmt: skip
    malformed_steps: ClassVar = {
        "a state of other rows": ({"state": z(1, 2, 16, 16)}, r"state must have shape \[.*got \[1, 2, 16, 16\]"),
        "a state of other sizes": ({"v": z(2, 2, 7)}, r"got \[2, 2"),
        "a state whose channels lie apart": ({"state": z(2, 2, 16, 16).mT}, "state must be contiguous"),
        "a list": ({"q": [1.0]}, "q must be a tensor of shape .*, got list"),
    }

    def make(self, dtype=torch.float64, device="cpu", seed=0, boundaries=None, **sizes) -> Call:
        options = {"scale": 0.7}
        if boundaries is not None:
            options["cu_seqlens"] = torch.tensor(boundaries, dtype=torch.int32, device=device)
            sizes |= {"B": 1, "T": boundaries[-1]}
        return Call(inputs(**sizes, dtype=dtype, device=device, seed=seed), options)

    def definition(self, q, k, v, g, *, scale, dt=None, D=None, initial_state=None):
        B, T, HV, V = v.shape
        S = v.new_zeros(B, HV, q.shape[3], V) if initial_state is None else initial_state
        q, k = (x.repeat_interleave(HV // x.shape[2], 2) for x in (q, k))
        outputs = []
        for t in range(T):
            written = v[:, t] if dt is None else dt[:, t, :, None] * v[:, t]
            S = g[:, t].exp()[..., None, None] * S + k[:, t].unsqueeze(3) * written.unsqueeze(2)
            o = scale * (S * q[:, t].unsqueeze(3)).sum(2)
            outputs.append(o if D is None else o + D[:, None] * v[:, t])
        return ScanOutput(torch.stack(outputs, 1), S)

    def operators(self, device):
        from tokenmix_core.ops.ssd.autograd import (
            ssd_backward_op,
            ssd_forward_op,
            ssd_prefill_op,
            ssd_recurrent_op,
            ssd_step_op,
        )

        x = inputs(B=1, T=3, N=1, dtype=torch.float32, device=device, steps=True)
        q, k, v, g, dt, D, state = (value.requires_grad_() for value in x.values())
        for op in ssd_forward_op, ssd_recurrent_op:
            yield op, (q, k, v, g, state, None, None, None, 1.0)
            yield op, (q, k, v, g, state, dt, D, None, 1.0)
        q, k, v, g, dt, D, state = (value.detach() for value in x.values())
        arguments = (torch.ones_like(v), state.clone(), None, q, k, v, g, state)
        yield ssd_backward_op, (*arguments, None, None, None, 1.0)
        yield ssd_backward_op, (*arguments, dt, D, None, 1.0)
        arguments = q[:, 0], k[:, 0], v[:, 0], g[:, 0], state, None, None, 1.0
        yield ssd_step_op, arguments
        slots = torch.zeros(1, dtype=torch.int32, device=device)
        yield ssd_step_op, (*arguments, None, slots)
        yield ssd_prefill_op, (state, slots, slots > 0, q, k, v, g, None, dt, D, None, 1.0)


def one_row(arguments, boundaries):
    """The first row of a call, as documents with these boundaries."""
    first = {name: x[:1] if isinstance(x, Tensor) else x for name, x in arguments.items()}
    return first | {
        "cu_seqlens": torch.tensor(boundaries, dtype=None if isinstance(boundaries[0], float) else torch.int32)
    }


@pytest.mark.parametrize("decay", [0.0, -1e4, float("-inf"), "mixed"])
def test_extreme_decays_give_what_the_reference_gives(decay, device):
    x = inputs(B=1, T=70, N=1, dtype=torch.float32, device=device)
    if decay == "mixed":
        x["g"][:, ::7] = -1e4
    else:
        x["g"].fill_(decay)
    got, upstream = values_and_gradients(partial(chunk_ssd, impl="triton"), x)
    exact, _ = values_and_gradients(partial(recurrent_ssd, impl="reference"), x, upstream, dtype=torch.float64)
    for name in got:
        assert relative_error(got[name], exact[name]) < 1e-4, name
    if decay in (-1e4, float("-inf")):
        # no path crosses a decay that lets nothing through
        assert not got["dg"].any()
        assert not got["dinitial_state"].any()


@pytest.mark.parametrize("T", [63, 64])
def test_strong_decays_cancel_at_the_last_token(T, device):
    x = inputs(B=1, T=T, G=1, HV=1, N=1, dtype=torch.float32, device=device)
    x["g"] *= 100
    reference = partial(chunk_ssd, impl="reference")
    # kernels scan in an order of their own; gates that did not cancel at the last token erred 80 times as much
    baseline = with_scanned_sums(reference)
    assert_agrees(partial(chunk_ssd, impl="triton"), reference, x, baseline=baseline, factor=4.0)


@pytest.mark.parametrize("form", [chunk_ssd, recurrent_ssd])
def test_one_token_may_lie_at_any_stride(form, device):
    x = inputs(B=3, T=1, G=2, HV=2, dtype=torch.float32, device=device, steps=True)
    results = []
    # contiguous as torch counts it, with a head's stride along time
    for lay in (lambda t: t, lambda t: t.transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2)):
        leaves = {name: (lay(t) if t.dim() > 2 else t).detach().requires_grad_() for name, t in x.items()}
        o = form(**leaves, impl="triton").o
        results.append((o, *torch.autograd.grad(o, list(leaves.values()), lay(torch.ones_like(o)))))
        D, token = leaves.pop("D").detach(), {name: t.detach()[:, 0] for name, t in leaves.items()}
        results[-1] += (ssd_step(**token, D=D, state=torch.ones(3, 2, 16, 16, device=device), impl="triton"),)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("used", ["o", "final_state"])
def test_gradients_flow_through_either_result_alone(used, device):
    x = inputs(N=2, dtype=torch.float32, device=device)
    got, expected = (gradients_through(partial(chunk_ssd, impl=impl), x, used) for impl in ("triton", "reference"))
    for name in x:
        assert relative_error(got[name], expected[name]) < 1e-5, name


def test_slices_of_a_wider_tensor_are_not_copied(device):
    from tokenmix_core.ops.ssd.types import token_rows

    wide = torch.randn(2, 66, 16 + 16 + 32, device=device)
    q, k, v = (part.unflatten(2, (-1, 16)) for part in wide.split([16, 16, 32], 2))
    assert all(token_rows(x) is x for x in (q, k, v))
    g = -torch.rand(2, 66, 2, device=device)
    got = chunk_ssd(q, k, v, g, impl="triton").o
    torch.testing.assert_close(got, chunk_ssd(q, k, v, g, impl="reference").o, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("K", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("V", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
def test_tiles_divide_what_they_tile(K, V, dtype):
    for G, HV in (1, 64), (16, 16), (1, 6):
        segment, forward, states, gradients = tuning.ssd_plan(2, 4096, 2, G, HV, K, V, dtype)
        assert segment % 64 == 0
        assert forward.BT == states.BT == gradients.BT
        assert V % forward.BV == V % states.BV == V % gradients.BV == 0
        assert K % states.BK == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_states_at_the_ends_of_a_span_are_those_of_the_scan(dtype):
    x = inputs(B=2, T=150, G=2, HV=4, N=2, dtype=dtype, steps=True)
    impl = "reference" if dtype == torch.float64 else "triton"
    leaves = x | {"initial_state": torch.zeros_like(x["initial_state"]).requires_grad_()}
    out = chunk_ssd(**leaves, scale=0.5, impl="reference")
    do = torch.randn(out.o.shape, dtype=dtype)
    (expected,) = torch.autograd.grad(out.o, leaves["initial_state"], do)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    assert relative_error(final_state(x["k"], x["v"], x["g"], x["dt"], impl), out.final_state) < tolerance
    assert relative_error(initial_gradient(x["q"], do, x["g"], 0.5, impl), expected) < tolerance
    alone = chunk_ssd(**(x | {"v": torch.zeros_like(x["v"])}), impl="reference").final_state
    assert relative_error(span_decay(x["g"])[..., None, None].exp() * x["initial_state"], alone) < tolerance
