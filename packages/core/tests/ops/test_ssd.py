"""SSD on any device: references against each other, kernels (in the interpreter without a GPU) against float64."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from tokenmix_core import tuning
from tokenmix_core.ops import chunk_ssd, recurrent_ssd, ssd_step
from tokenmix_core.testing.agreement import assert_agrees, gradients_through, values_and_gradients, with_scanned_sums
from tokenmix_core.testing.closeness import relative_error

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


def borders(values=PACKED, device="cpu"):
    return torch.tensor(values, dtype=torch.int32, device=device)


def plan_with(monkeypatch, **changes):
    """Let every call use the shape's plan with `changes`."""
    original = tuning.ssd

    def plan(*shape):
        return original(*shape)._replace(**changes)

    monkeypatch.setattr(tuning, "ssd", plan)


@pytest.mark.parametrize("T", [1, 2, 63, 64, 65, 130])
def test_chunkwise_reference_equals_the_definition(T):
    x = inputs(T=T, G=2, HV=4, K=4, V=3, N=2, steps=True)
    by_chunks, upstream = values_and_gradients(partial(chunk_ssd, scale=0.7), x)
    by_tokens, _ = values_and_gradients(partial(recurrent_ssd, scale=0.7), x, upstream)
    for name in by_tokens:
        assert relative_error(by_chunks[name], by_tokens[name]) < 1e-12, name


def test_the_definition_is_the_equation():
    x = inputs(B=1, T=4, G=1, HV=1, K=3, V=2, N=1, steps=True)
    S, outputs = x["initial_state"][0, 0], []
    for t in range(4):
        v = x["v"][0, t, 0]
        S = x["g"][0, t, 0].exp() * S + torch.outer(x["k"][0, t, 0], x["dt"][0, t, 0] * v)
        outputs.append(0.5 * S.T @ x["q"][0, t, 0] + x["D"][0] * v)
    o, final_state = recurrent_ssd(**x, scale=0.5)
    torch.testing.assert_close(o[0, :, 0], torch.stack(outputs))
    torch.testing.assert_close(final_state[0, 0], S)


def test_reference_gradients_are_those_of_finite_differences():
    x = inputs(B=1, T=3, G=1, HV=2, K=2, V=2, N=1, steps=True)
    leaves = [value.requires_grad_() for value in x.values()]
    assert torch.autograd.gradcheck(lambda *values: chunk_ssd(**dict(zip(x, values, strict=True))), leaves)


@pytest.mark.parametrize("form", [chunk_ssd, recurrent_ssd])
def test_packed_sequences_never_mix(form):
    x = inputs(B=1, T=70, G=1, HV=2, K=4, V=4, N=5)
    o, final_state = form(**x, cu_seqlens=borders())
    for n in range(5):
        begin, end = PACKED[n : n + 2]
        alone = {name: value[:, begin:end] for name, value in x.items() if name != "initial_state"}
        state = x["initial_state"][n : n + 1]
        if begin == end:
            torch.testing.assert_close(final_state[n], state[0])
            continue
        expected = form(**alone, initial_state=state)
        torch.testing.assert_close(o[:, begin:end], expected.o)
        torch.testing.assert_close(final_state[n], expected.final_state[0])


def test_shared_groups_equal_expanded_ones():
    x = inputs(G=2, HV=6, K=4, V=4)
    expanded = x | {name: x[name].repeat_interleave(3, 2) for name in "qk"}
    torch.testing.assert_close(chunk_ssd(**x).o, chunk_ssd(**expanded).o)


@pytest.mark.parametrize("split", [1, 33, 64])
def test_a_sequence_in_two_pieces_equals_the_whole(split):
    x = inputs(K=4, V=4)
    whole = chunk_ssd(**x)
    first = chunk_ssd(**{name: value[:, :split] for name, value in x.items()})
    rest = chunk_ssd(**{name: value[:, split:] for name, value in x.items()}, initial_state=first.final_state)
    torch.testing.assert_close(torch.cat([first.o, rest.o], 1), whole.o)
    torch.testing.assert_close(rest.final_state, whole.final_state)


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_steps_equal_the_whole_and_update_the_state_in_place(impl, device):
    x = inputs(B=2, T=3, G=1, HV=2, N=2, dtype=torch.float32, device=device, steps=True)
    whole = recurrent_ssd(**x, impl="reference")
    state, D = x.pop("initial_state").clone(), x.pop("D")
    address = state.data_ptr()
    for t in range(3):
        o = ssd_step(**{name: value[:, t] for name, value in x.items()}, D=D, state=state, impl=impl)
        torch.testing.assert_close(o, whole.o[:, t], rtol=1e-5, atol=1e-5)
    assert state.data_ptr() == address
    torch.testing.assert_close(state, whole.final_state, rtol=1e-5, atol=1e-5)


# what the interpreter can afford: each case takes a path of its own through the kernels
KERNEL_CASES = {
    "ragged, with states": (dict(B=2, T=70, N=2), {}, {}),
    "steps and a skip": (dict(B=2, T=70, N=2, steps=True), {}, {}),
    # each dg is a sum of products of either sign, which may come out next to nothing: one by itself has no bar
    "one token": (dict(B=8, T=1, N=8), {}, {}),
    "unequal head sizes, one group": (dict(B=1, T=66, HV=4, K=16, V=32), {}, {}),
    "packed": (dict(B=1, T=70, G=2, HV=4, N=5), {"cu_seqlens": PACKED}, {}),
    "segments": (dict(B=1, T=150, N=1), {}, {"segment": 64}),
    "segments with steps and a skip": (dict(B=1, T=150, N=1, steps=True), {}, {"segment": 64}),
    "packed segments, groups": (dict(B=1, T=70, HV=2, N=5), {"cu_seqlens": PACKED}, {"segment": 64}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
@pytest.mark.parametrize("case", KERNEL_CASES)
def test_kernels_agree_with_the_reference(case, dtype, device, monkeypatch):
    shape, options, plan = KERNEL_CASES[case]
    plan_with(monkeypatch, **plan)
    if "cu_seqlens" in options:
        options = {"cu_seqlens": borders(options["cu_seqlens"], device)}
    ssd = partial(chunk_ssd, scale=0.7, **options)
    assert_agrees(
        partial(ssd, impl="triton"), partial(ssd, impl="reference"), inputs(**shape, dtype=dtype, device=device)
    )


@pytest.mark.parametrize("form", [chunk_ssd, recurrent_ssd])
def test_heads_widened_by_zeros_agree_with_the_reference(form, device, monkeypatch):
    from tokenmix_core.ops.ssd import autograd

    # what kernels get wrong on a GPU, they get right in the interpreter
    monkeypatch.setattr(autograd, "needs_widening", lambda x, *sizes: True)
    x = inputs(B=1, T=9, K=16, V=32, N=1, dtype=torch.float32, device=device, steps=True)
    ssd = partial(form, scale=0.7)
    assert_agrees(partial(ssd, impl="triton"), partial(ssd, impl="reference"), x)


def test_token_by_token_kernel_agrees_with_the_reference(device):
    x = inputs(B=1, T=9, G=1, HV=2, N=3, dtype=torch.float32, device=device, steps=True)
    ssd = partial(recurrent_ssd, scale=0.7, cu_seqlens=borders([0, 0, 5, 9], device))
    assert_agrees(partial(ssd, impl="triton"), partial(ssd, impl="reference"), x)


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


def test_slices_of_a_wider_tensor_are_read_in_place(device):
    from tokenmix_core.ops.ssd.autograd import token_rows

    wide = torch.randn(2, 66, 16 + 16 + 32, device=device)
    q, k, v = (part.unflatten(2, (-1, 16)) for part in wide.split([16, 16, 32], 2))
    assert all(token_rows(x) is x for x in (q, k, v))
    g = -torch.rand(2, 66, 2, device=device)
    got = chunk_ssd(q, k, v, g, impl="triton").o
    torch.testing.assert_close(got, chunk_ssd(q, k, v, g, impl="reference").o, rtol=1e-4, atol=1e-4)


def test_custom_ops_pass_torchs_own_checks(device):
    from tokenmix_core.ops.ssd.autograd import ssd_backward_op, ssd_forward_op, ssd_recurrent_op, ssd_step_op

    x = inputs(B=1, T=3, N=1, dtype=torch.float32, device=device, steps=True)
    q, k, v, g, dt, D, state = (value.requires_grad_() for value in x.values())
    for op in ssd_forward_op, ssd_recurrent_op:
        torch.library.opcheck(op, (q, k, v, g, 1.0, state, None))
        torch.library.opcheck(op, (q, k, v, g, 1.0, state, None, dt, D))
    q, k, v, g, dt, D, state = (value.detach() for value in x.values())
    arguments = (q, k, v, g, 1.0, state, None, None, torch.ones_like(v), state.clone())
    torch.library.opcheck(ssd_backward_op, arguments)
    torch.library.opcheck(ssd_backward_op, (*arguments, dt, D))
    torch.library.opcheck(ssd_step_op, (q[:, 0], k[:, 0], v[:, 0], g[:, 0], state, 1.0))


@pytest.mark.parametrize("form", [chunk_ssd, recurrent_ssd])
def test_compiles_into_one_graph(form, device):
    x = inputs(B=1, T=3, N=1, dtype=torch.float32, device=device, steps=True)
    compiled = torch.compile(partial(form, impl="triton"), fullgraph=True, backend="aot_eager")
    got, upstream = values_and_gradients(compiled, x)
    expected, _ = values_and_gradients(partial(form, impl="triton"), x, upstream)
    for name in expected:
        torch.testing.assert_close(got[name], expected[name])


MALFORMED = {
    "a missing axis": (lambda x: x | {"q": x["q"][0]}, "q must have shape"),
    "keys of another size": (lambda x: x | {"k": x["k"][..., :8]}, "k must have shape"),
    "values of another length": (lambda x: x | {"v": x["v"][:, :3]}, "v must have shape"),
    "gates per channel": (lambda x: x | {"g": x["g"][..., None]}, "g must have shape"),
    "groups that do not divide": (lambda x: x | {n: x[n].expand(-1, -1, 3, -1) for n in "qk"}, "HV must be a multiple"),
    "mixed dtypes": (lambda x: x | {"k": x["k"].double()}, "share one dtype"),
    "integers": (lambda x: x | {n: x[n].long() for n in "qkv"}, "must be bfloat16, float16, float32"),
    "a state of other heads": (lambda x: x | {"initial_state": torch.zeros(2, 3, 16, 16)}, "initial_state must have"),
    "steps of other heads": (lambda x: x | {"dt": x["g"][:, :, :1]}, "dt must have shape"),
    "a skip for each channel": (lambda x: x | {"D": torch.ones(2, 16)}, "D must have shape"),
    "an integer skip": (lambda x: x | {"D": torch.ones(2).long()}, "D must be bfloat16, float16, float32"),
    "a half-precision state": (lambda x: x | {"initial_state": torch.zeros(2, 2, 16, 16).half()}, "must be float32"),
    "no tokens": (lambda x: {n: t[:, :0] for n, t in x.items()}, "at least one token"),
    "a list": (lambda x: x | {"v": [1.0]}, "v must be a tensor"),
    "no keys": (lambda x: x | {"k": None}, "k must be a tensor .* got None"),
    "a scale that is no number": (lambda x: x | {"scale": float("nan")}, "scale must be a finite number, got nan"),
    "packed rows": (lambda x: x | {"cu_seqlens": torch.tensor([0, 4])}, "B = 1"),
    "an unknown implementation": (lambda x: x | {"impl": "cuda"}, "impl must be"),
}


@pytest.mark.parametrize("form", [chunk_ssd, recurrent_ssd])
@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_calls_say_what_was_got_and_expected(form, case):
    change, message = MALFORMED[case]
    with pytest.raises(ValueError, match=message):
        form(**change(inputs(T=4, dtype=torch.float32)))


@pytest.mark.parametrize("cu_seqlens", [[0, 5, 3, 4], [1, 4], [0, 3], [0]])
def test_borders_that_do_not_fit_are_refused(cu_seqlens):
    with pytest.raises(ValueError, match="cu_seqlens"):
        chunk_ssd(**inputs(B=1, T=4), cu_seqlens=torch.tensor(cu_seqlens))


def test_head_sizes_without_a_kernel_are_refused_with_the_way_out(device):
    with pytest.raises(ValueError, match="K in 16, 32, 64, 128, 256, got K=24; pad"):
        chunk_ssd(**inputs(K=24, dtype=torch.float32, device=device), impl="triton")


@pytest.mark.parametrize("K", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("V", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
def test_tiles_divide_what_they_tile(K, V, dtype):
    for G, HV in (1, 64), (16, 16), (1, 6):
        segment, forward, states, gradients = tuning.ssd(2, 4096, 2, G, HV, K, V, dtype)
        assert segment % 64 == 0
        assert forward.BT == states.BT == gradients.BT
        assert V % forward.BV == V % states.BV == V % gradients.BV == 0
        assert K % states.BK == 0
