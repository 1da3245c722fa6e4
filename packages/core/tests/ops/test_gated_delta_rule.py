"""The gated delta rule on any device: references against each other, kernels against float64."""

from __future__ import annotations

import math
from functools import partial
from itertools import pairwise

import pytest
import torch

from tokenmix_core import tuning
from tokenmix_core.chunking import chunk_slots
from tokenmix_core.ops import chunk_gated_delta_rule, gated_delta_rule_step, recurrent_gated_delta_rule
from tokenmix_core.ops.gated_delta_rule.groups import sum_groups
from tokenmix_core.testing.agreement import assert_agrees, gradients_through, values_and_gradients, watched
from tokenmix_core.testing.closeness import assert_within, relative_error

PACKED = [0, 0, 1, 64, 64, 129]


def inputs(B=2, T=70, H=1, HV=2, K=16, V=16, N=None, dtype=torch.float64, device="cpu", seed=0):
    """Random arguments by name, β in [0, 2]; `N` adds an initial state of N sequences."""
    generator = torch.Generator(device).manual_seed(seed)
    randn = partial(torch.randn, generator=generator, device=device)
    rand = partial(torch.rand, generator=generator, device=device)
    gate = torch.float64 if dtype == torch.float64 else torch.float32
    x = {
        "q": randn(B, T, H, K).to(dtype),
        "k": randn(B, T, H, K).to(dtype),
        "v": randn(B, T, HV, V).to(dtype),
        "g": -rand(B, T, HV).to(gate),
        "beta": 2 * rand(B, T, HV).to(gate),
    }
    return x | ({"initial_state": randn(N, HV, K, V).to(gate)} if N else {})


def borders(values=PACKED, device="cpu"):
    return torch.tensor(values, dtype=torch.int32, device=device)


def check(x, form=chunk_gated_delta_rule, **options):
    options = {"qk_l2norm": True} | options
    assert_agrees(partial(form, impl="triton", **options), partial(form, impl="reference", **options), x)


@pytest.mark.parametrize("T", [1, 2, 63, 64, 65, 130])
@pytest.mark.parametrize("qk_l2norm", [False, True])
def test_chunkwise_reference_equals_the_definition(T, qk_l2norm):
    x = inputs(T=T, H=2, HV=4, K=4, V=3, N=2)
    x["k"] = x["k"] / 2
    by_chunks, upstream = values_and_gradients(partial(chunk_gated_delta_rule, scale=0.7, qk_l2norm=qk_l2norm), x)
    form = partial(recurrent_gated_delta_rule, scale=0.7, qk_l2norm=qk_l2norm)
    by_tokens, _ = values_and_gradients(form, x, upstream)
    for name in by_tokens:
        assert relative_error(by_chunks[name], by_tokens[name]) < 1e-10, name


def test_the_definition_is_the_equation():
    x = inputs(B=1, T=4, H=1, HV=1, K=3, V=2, N=1)
    S, outputs = x["initial_state"][0, 0].T, []
    for t in range(4):
        q, k, v = (x[name][0, t, 0] for name in "qkv")
        alpha, beta = x["g"][0, t, 0].exp(), x["beta"][0, t, 0]
        # Yang et al. 2025, eq. 10, whose state is [V, K]
        S = S @ (alpha * (torch.eye(3, dtype=torch.float64) - beta * torch.outer(k, k))) + beta * torch.outer(v, k)
        outputs.append(0.5 * S @ q)
    o, final_state = recurrent_gated_delta_rule(**x, scale=0.5)
    torch.testing.assert_close(o[0, :, 0], torch.stack(outputs))
    torch.testing.assert_close(final_state[0, 0], S.T)


def test_reference_gradients_are_those_of_finite_differences():
    leaves = [x.requires_grad_() for x in inputs(B=1, T=3, H=1, HV=2, K=2, V=2, N=1).values()]
    form = partial(chunk_gated_delta_rule, qk_l2norm=True)
    assert torch.autograd.gradcheck(lambda *x: form(*x[:5], initial_state=x[5]), leaves)


@pytest.mark.parametrize("form", [chunk_gated_delta_rule, recurrent_gated_delta_rule])
def test_packed_sequences_never_mix(form):
    x = inputs(B=1, T=129, H=1, HV=2, K=4, V=4, N=5)
    o, final_state = form(**x, cu_seqlens=borders(), qk_l2norm=True)
    for n in range(5):
        begin, end = PACKED[n : n + 2]
        if begin == end:
            torch.testing.assert_close(final_state[n], x["initial_state"][n])
            continue
        alone = {name: value[:, begin:end] for name, value in x.items() if name != "initial_state"}
        got = form(**alone, initial_state=x["initial_state"][n : n + 1], qk_l2norm=True)
        torch.testing.assert_close(o[:, begin:end], got.o)
        torch.testing.assert_close(final_state[n], got.final_state[0])


@pytest.mark.parametrize("decay", [0.0, -1e4, float("-inf")])
@pytest.mark.parametrize("beta", [0.0, 1.0, 2.0])
def test_extreme_gates_stay_finite_in_the_reference(decay, beta):
    x = inputs(T=70, K=8, V=8, dtype=torch.float32)
    x["k"][:, 10:] = x["k"][:, 10:11]
    x["g"].fill_(decay)
    x["beta"].fill_(beta)
    # the definition itself has no gradient at −∞
    results, _ = values_and_gradients(partial(chunk_gated_delta_rule, qk_l2norm=True), x)
    for name, value in results.items():
        assert torch.isfinite(value).all(), name


def test_a_state_carried_over_continues_the_sequence():
    x = inputs(T=100, K=8, V=8)
    whole = chunk_gated_delta_rule(**x)
    first = chunk_gated_delta_rule(**{name: value[:, :37] for name, value in x.items()})
    second = chunk_gated_delta_rule(
        **{name: value[:, 37:] for name, value in x.items()}, initial_state=first.final_state
    )
    torch.testing.assert_close(torch.cat([first.o, second.o], 1), whole.o)
    torch.testing.assert_close(second.final_state, whole.final_state)


def test_kernels_agree_with_the_reference(device):
    check(inputs(T=70, K=64, V=64, N=2, dtype=torch.float32, device=device))


def test_kernels_agree_on_packed_batches_with_states(device):
    x = inputs(B=1, T=129, H=1, HV=2, K=64, V=128, N=5, dtype=torch.float32, device=device)
    check(x, cu_seqlens=borders(device=device), scale=0.3)


def test_kernels_agree_without_norm_or_states(device):
    x = inputs(B=1, T=65, H=1, HV=1, K=128, V=64, dtype=torch.float32, device=device)
    x["k"] = torch.nn.functional.normalize(x["k"], dim=-1)
    check(x, qk_l2norm=False)


def test_kernels_agree_for_extreme_gates(device):
    x = inputs(B=1, T=70, HV=1, K=64, V=64, N=1, dtype=torch.float32, device=device)
    # β = 2 between decays near 1 is badly conditioned: where is a matter of the draw, so the draw is the same each time
    hard = torch.rand(x["g"].shape, generator=torch.Generator().manual_seed(0)) < 0.2
    x["g"] = torch.where(hard.to(device), -1e4, 0.1 * x["g"])
    x["beta"][:, 5:9] = 0
    x["beta"][:, 20:30] = 2
    check(x)


# decays that are forgotten within a segment, that are not, and the first followed by the second
@pytest.mark.parametrize("slow", [slice(0), slice(None), slice(130, None)], ids=["fast", "slow", "mixed"])
def test_sequences_split_into_segments_agree(slow, device, monkeypatch):
    monkeypatch.setattr(tuning, "gated_delta_rule_segment", lambda *_: 64)
    x = inputs(B=1, T=200, HV=1, K=64, V=64, N=1, dtype=torch.float32, device=device)
    x["g"] *= 4
    x["g"][:, slow] *= 0.01
    check(x)


# what each step takes as forgotten differs by half a power of two, so that none asks for what another left out
@pytest.mark.parametrize("left", [-31.5, -32.25, -32.75, -33.5])
def test_segments_that_barely_forget_agree(left, device, monkeypatch):
    monkeypatch.setattr(tuning, "gated_delta_rule_segment", lambda *_: 128)
    x = inputs(B=1, T=400, HV=1, K=64, V=64, N=1, dtype=torch.float32, device=device)
    # what a chunk of 64 tokens leaves of a state, as a base-2 logarithm
    x["g"][:] = left / 64 * math.log(2)
    check(x)


def test_segments_follow_the_borders_of_packed_sequences(device, monkeypatch):
    monkeypatch.setattr(tuning, "gated_delta_rule_segment", lambda *_: 128)
    x = inputs(B=1, T=270, HV=1, K=64, V=64, dtype=torch.float32, device=device)
    x["g"] *= 0.1
    x["initial_state"] = torch.randn(4, 1, 64, 64, device=device)
    check(x, cu_seqlens=borders([0, 0, 2, 2, 270], device))


@pytest.mark.parametrize("segment", [0, 64, 128])
@pytest.mark.parametrize("N", [1, 7, 200])
def test_packed_pieces_begin_with_the_longest(N, segment, device):
    from tokenmix_core.ops.gated_delta_rule.order import longest_first

    T = 2000
    inner = torch.randint(0, T + 1, (N - 1,), generator=torch.Generator().manual_seed(0)).sort().values
    cuts = [0, *inner.tolist(), T]
    slots, size = chunk_slots(1, T, segment or T + 1, borders(cuts)), segment or T + 1
    lengths = [0] * slots
    for n, (start, end) in enumerate(pairwise(cuts)):
        for i, first in enumerate(range(start, end, size)):
            lengths[start // size + n + i] = min(size, end - first)
    order = longest_first(T, segment, borders(cuts, device)).tolist()
    assert order == sorted(range(slots), key=lambda slot: (-lengths[slot], slot))


def test_recurrent_kernel_agrees_with_its_gradients(device):
    check(inputs(B=1, T=3, K=64, V=64, N=1, dtype=torch.float32, device=device), recurrent_gated_delta_rule)


@pytest.mark.parametrize("used", ["o", "final_state"])
def test_one_output_alone_may_be_differentiated(device, used):
    x = inputs(B=1, T=4, HV=1, K=64, V=64, N=1, dtype=torch.float32, device=device)
    form = partial(chunk_gated_delta_rule, qk_l2norm=True)
    got, expected = (gradients_through(partial(form, impl=impl), x, used) for impl in ("triton", "reference"))
    for name in x:
        assert relative_error(got[name], expected[name]) < 1e-5, name


def test_every_element_is_written(device):
    x = inputs(B=1, T=67, H=1, HV=2, K=64, V=64, N=3, dtype=torch.float32, device=device)
    form = partial(chunk_gated_delta_rule, cu_seqlens=borders([0, 2, 2, 67], device), qk_l2norm=True, impl="triton")
    # fills what is allocated with NaN
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.utils.deterministic.fill_uninitialized_memory
        results, _ = values_and_gradients(form, x)
    finally:
        torch.use_deterministic_algorithms(False)
    for name, value in results.items():
        assert torch.isfinite(value).all(), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_sums_over_groups_are_rounded_once(device, dtype):
    dq, dk = torch.randn(2, 3, 37, 6, 48, device=device).to(dtype)
    for x, y in zip((dq, dk), sum_groups(dq, dk, 2), strict=True):
        assert torch.equal(y, x.view(3, 37, 2, 3, 48).float().sum(3).to(dtype))


@pytest.mark.parametrize("impl", ["triton", "reference"])
def test_a_step_updates_the_state_in_place(device, impl):
    x = inputs(B=2, T=1, K=64, V=64, N=2, dtype=torch.float32, device=device)
    state = x["initial_state"].clone()
    tokens = {name: value[:, 0] for name, value in x.items() if name != "initial_state"}
    o = gated_delta_rule_step(**tokens, state=state, qk_l2norm=True, impl=impl)
    double = {name: value.double() for name, value in x.items()}
    exact = recurrent_gated_delta_rule(**double, qk_l2norm=True, impl="reference")
    eager = recurrent_gated_delta_rule(**x, qk_l2norm=True, impl="reference")
    assert_within("o", o, exact.o[:, 0], eager.o[:, 0], floor=1e-6)
    assert_within("state", state, exact.final_state, eager.final_state, floor=1e-6)


def test_gradients_keep_the_dtypes_of_their_inputs(device):
    x = inputs(B=1, T=2, HV=1, K=64, V=64, N=1, dtype=torch.bfloat16, device=device)
    x["g"] = x["g"].bfloat16()
    leaves = {name: value.requires_grad_() for name, value in x.items()}
    o, final_state = chunk_gated_delta_rule(**leaves, qk_l2norm=True, impl="triton")
    assert (o.dtype, final_state.dtype) == (torch.bfloat16, torch.float32)
    for value, grad in zip(leaves.values(), torch.autograd.grad(o.sum(), list(leaves.values())), strict=True):
        assert (grad.dtype, grad.shape) == (value.dtype, value.shape)


def test_a_backward_pass_shows_itself_to_a_mode_that_watches(device):
    x = inputs(B=1, T=2, HV=1, K=64, V=64, N=1, dtype=torch.float32, device=device)
    leaves = [value.requires_grad_() for value in x.values()]
    output = chunk_gated_delta_rule(**x, qk_l2norm=True, impl="triton")
    backward = partial(torch.autograd.grad, output, leaves, [value.detach() for value in output], retain_graph=True)
    wanted = backward()
    got, seen = watched(backward)
    assert "tokenmix.gated_delta_rule_backward.default" in seen
    assert all(map(torch.equal, got, wanted))


def test_registered_as_torch_operators(device):
    from tokenmix_core.ops.gated_delta_rule import autograd as ops

    x = inputs(B=1, T=2, HV=1, K=64, V=64, N=1, dtype=torch.float32, device=device)
    arguments = tuple(value.requires_grad_() for value in x.values())
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    for op in (ops.chunk_op, ops.recurrent_op):
        torch.library.opcheck(op, (*arguments, None, 0.5, True), test_utils=tests)
    tokens = [value.detach()[:, 0] for value in arguments[:5]]
    o, final_state, *terms = ops.chunk_op(*(value.detach() for value in arguments), None, 0.5, True)
    saved = (*(value.detach() for value in arguments[:5]), *terms, arguments[5].detach(), None)
    torch.library.opcheck(ops.backward_op, (o, final_state, *saved, 0.5, True), test_utils=tests)
    torch.library.opcheck(ops.step_op, (*tokens, arguments[5].detach(), 0.5, True), test_utils=tests)


def test_compiles_into_one_graph(device):
    x = inputs(B=1, T=2, HV=1, K=64, V=64, N=1, dtype=torch.float32, device=device)

    def loss(*x):
        o, final_state = chunk_gated_delta_rule(*x[:5], initial_state=x[5], qk_l2norm=True, impl="triton")
        return o.sum() + final_state.square().sum()

    leaves = [value.requires_grad_() for value in x.values()]
    expected = torch.autograd.grad(loss(*leaves), leaves)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for name, got, wanted in zip(x, torch.autograd.grad(compiled(*leaves), leaves), expected, strict=True):
        torch.testing.assert_close(got, wanted, msg=name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": torch.zeros(2, 70, 1, 8)}, r"k must have shape \[B, T, H, K\] with .*K=16, got \[2, 70, 1, 8\]"),
        ({"v": torch.zeros(2, 70, 3, 16), "q": torch.zeros(2, 70, 2, 16)}, "k must have shape"),
        ({"beta": torch.zeros(2, 70)}, r"beta must have shape .*, got \[2, 70\]"),
        ({"initial_state": torch.zeros(3, 2, 16, 16)}, r"initial_state must have shape .*N=2, got \[3, 2, 16, 16\]"),
        ({"cu_seqlens": torch.tensor([0, 70])}, "a packed batch has B = 1, got B = 2"),
        ({"q": torch.zeros(2, 70, 1, 16, dtype=torch.int64)}, "q must be .*, got int64"),
        ({"impl": "cuda"}, "impl must be None or one of 'gluon', 'triton', 'reference', got 'cuda'"),
        ({"impl": "triton"}, r"K in \{64, 128, 256\}, got K=16; pad the heads, or pass impl='reference'"),
        ({"q": [1.0]}, "q must be a tensor .*, got list"),
        ({"beta": None}, "beta must be a tensor .*, got None"),
        ({"scale": float("nan")}, "scale must be a finite number, got nan"),
        ({"scale": [1.0]}, r"scale must be a finite number, got \[1.0\]"),
    ],
)
def test_bad_arguments_are_named(change, message):
    x = inputs(dtype=torch.float32) | change
    with pytest.raises(ValueError, match=message):
        chunk_gated_delta_rule(**x)


def test_value_heads_must_be_a_multiple_of_key_heads():
    x = inputs(H=2, HV=3, dtype=torch.float32)
    with pytest.raises(ValueError, match="HV must be a multiple of H, got HV=3 and H=2"):
        chunk_gated_delta_rule(**x)


def test_a_step_refuses_a_state_it_cannot_update():
    x = inputs(B=1, T=1, K=64, V=64, dtype=torch.float32)
    tokens = {name: value[:, 0] for name, value in x.items()}
    with pytest.raises(ValueError, match="state must be contiguous to be updated in place"):
        gated_delta_rule_step(**tokens, state=torch.zeros(1, 2, 64, 64).mT)
