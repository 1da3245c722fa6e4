"""SSD's kernels on a GPU: every tile configuration against float64, long and large inputs, graphs, no stalls."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from support.refused import refused_on_3_8
from support.streams import assert_replays, stalls_forbidden
from tokenmix_core.ops import chunk_ssd, recurrent_ssd, ssd_step
from tokenmix_core.ops.ssd import tuning
from tokenmix_core.testing.agreement import assert_agrees, values_and_gradients, with_scanned_sums
from tokenmix_core.testing.closeness import assert_within, relative_error

pytestmark = pytest.mark.gpu

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
PACKED = [0, 0, 5, 70, 134, 134, 390, 1000]


def inputs(B, T, G, HV, K, V, N=None, dtype=torch.bfloat16, decay="mild", seed=0, steps=False):
    """Random arguments by name; `N` adds an initial state of N sequences, `steps` Δ and D."""
    generator = torch.Generator("cuda").manual_seed(seed)
    randn = partial(torch.randn, generator=generator, device="cuda")
    g = -torch.rand(B, T, HV, generator=generator, device="cuda") * 0.2
    if decay == "extreme":
        g = torch.where(torch.rand(g.shape, generator=generator, device="cuda") < 0.1, -1e4, g)
    x = {
        "q": (randn(B, T, G, K) * K**-0.5).to(dtype),
        "k": randn(B, T, G, K).to(dtype),
        "v": randn(B, T, HV, V).to(dtype),
        "g": g,
    }
    if steps:
        x |= {"dt": 0.1 + torch.rand(B, T, HV, generator=generator, device="cuda"), "D": randn(HV)}
    return x | ({"initial_state": randn(N, HV, K, V)} if N else {})


def boundaries(values=PACKED):
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def plan_with(override, **changes):
    """Let every call use the shape's plan with `changes`, segments with states made beforehand."""
    original = tuning.ssd_plan

    def plan(*shape):
        plan = original(*shape)._replace(**changes)
        return plan._replace(forward=plan.forward._replace(lookback=0)) if "segment" in changes else plan

    override(tuning, ssd_plan=plan)


def check(x, **options):
    ssd = partial(chunk_ssd, scale=0.7, **options)
    assert_agrees(partial(ssd, impl=None), partial(ssd, impl="reference"), x)


# float16 and float32 compile long for wide heads: the sizes that models use stand for the small ones
HEAD_SIZES = [(torch.bfloat16, K, V) for K in (16, 32, 64, 128, 256) for V in (16, 32, 64, 128, 256)]
HEAD_SIZES += [(dtype, K, V) for dtype in DTYPES[1:] for K in (64, 128, 256) for V in (64, 128, 256)]


@pytest.mark.parametrize(("dtype", "K", "V"), HEAD_SIZES, ids=lambda x: str(x).removeprefix("torch."))
@pytest.mark.parametrize("segment", [0, 64], ids=["whole", "segments"])
def test_every_head_size(K, V, dtype, segment, override):
    plan_with(override, segment=segment)
    with refused_on_3_8(K, dtype):
        check(inputs(2, 200, 1, 2, K, V, N=2, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize(("K", "V"), [(128, 64), (64, 128), (64, 64), (128, 128)])
@pytest.mark.parametrize(
    "heads", [(1, 4), (1, 8), (2, 8), (4, 8), (8, 8), (16, 8)], ids=lambda x: f"{x[0]} heads, {x[1]} warps"
)
def test_gradients_of_several_heads_a_program(heads, K, V, dtype, override):
    if heads[0] > 1 and K == V == 128:
        pytest.skip("two states of such heads do not fit")
    B, T, G, HV = 2, 1000, 1, 16
    gradients = tuning.ssd_plan(B, T, B, G, HV, K, V, dtype).gradients._replace(hopper=tuning.SSDHopper(*heads))
    plan_with(override, gradients=gradients)
    check(inputs(B, T, G, HV, K, V, N=B, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize(("K", "V"), [(128, 64), (64, 128), (64, 64), (128, 128), (128, 256)])
@pytest.mark.parametrize("lookback", [64, 128])
def test_segments_that_look_back(lookback, K, V, dtype, override):
    forward = tuning.ssd_plan(2, 450, 2, 1, 2, K, V, dtype).forward._replace(lookback=lookback)
    plan_with(override, forward=forward)
    check(inputs(2, 450, 1, 2, K, V, N=2, dtype=dtype, steps=lookback == 64))


@pytest.mark.parametrize("steps", [False, True], ids=["", "steps"])
@pytest.mark.parametrize("segment", [0, 256], ids=["whole", "segments"])
@pytest.mark.parametrize("packed", [False, True], ids=["one length", "packed, extreme decays"])
@pytest.mark.parametrize(
    ("K", "V", "dtype"),
    [(K, V, torch.bfloat16) for K in (64, 128) for V in (64, 128)] + [(128, 128, torch.float16)],
    ids=lambda x: str(x).removeprefix("torch."),
)
def test_gradients_by_a_reverse_scan(K, V, dtype, packed, segment, steps, override):
    T = 1000 if packed else 300
    gradients = tuning.ssd_plan(1, T, 1, 1, 2, K, V, dtype).gradients._replace(
        hopper=tuning.SSDHopper(1, 4), scans=True
    )
    plan_with(override, gradients=gradients, segment=segment)
    shape = (1, T, 1, 2, K, V, 7) if packed else (3, T, 1, 2, K, V, 3)
    x = inputs(*shape, dtype=dtype, decay="extreme" if packed else "mild", steps=steps)
    check(x, **({"cu_seqlens": boundaries()} if packed else {}))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("segment", [0, 64], ids=["whole", "segments"])
@pytest.mark.parametrize(("K", "V"), [(16, 32), (128, 64), (128, 128)])
def test_steps_and_a_skip(K, V, dtype, segment, override):
    gradients = tuning.ssd_plan(2, 200, 2, 1, 2, K, V, dtype).gradients._replace(scans=False)
    plan_with(override, gradients=gradients, segment=segment)
    check(inputs(2, 200, 1, 2, K, V, N=2, dtype=dtype, steps=True))


@pytest.mark.parametrize("segment", [0, 256], ids=["whole", "segments"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize(
    ("K", "V", "columns"),
    [
        (128, 64, 64), (64, 128, 64), (64, 128, 128), (64, 64, 64), (128, 128, 64), (128, 128, 128),
        (64, 256, 64), (128, 256, 64), (256, 64, 64), (256, 128, 128), (256, 256, 128),
    ],
)  # fmt: skip
def test_outputs_of_some_columns_a_program(K, V, columns, dtype, packed, segment, override):
    forward = tuning.ssd_plan(1, 1000, 1, 1, 2, K, V, dtype).forward._replace(hopper=columns)
    plan_with(override, forward=forward, segment=segment)
    x = inputs(1, 1000, 1, 2, K, V, N=7 if packed else 1, dtype=dtype, steps=K == 256)
    check(x, **({"cu_seqlens": boundaries()} if packed else {}))


def test_rows_that_begin_at_multiples_of_16_bytes_alone():
    def ssd(q, k, v, g, impl):
        q, k, v = (torch.nn.functional.pad(x.flatten(2), (8, 0))[..., 8:].view(x.shape) for x in (q, k, v))
        return chunk_ssd(q, k, v, g, impl=impl)

    assert_agrees(partial(ssd, impl=None), partial(ssd, impl="reference"), inputs(2, 130, 1, 2, 64, 64))


@pytest.mark.parametrize(("G", "HV"), [(1, 8), (2, 8), (8, 8)])
def test_heads_that_share_a_group(G, HV):
    check(inputs(1, 200, G, HV, 128, 64, N=1))


@pytest.mark.parametrize("segment", [0, 64, 256])
@pytest.mark.parametrize("decay", ["mild", "extreme"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_packed_batches_with_empty_sequences(dtype, decay, segment, override):
    plan_with(override, segment=segment)
    check(inputs(1, 1000, 1, 2, 128, 64, N=7, dtype=dtype, decay=decay), cu_seqlens=boundaries())


@pytest.mark.parametrize("T", [1, 63, 64, 65, 1000])
def test_every_length(T):
    check(inputs(4, T, 4, 4, 64, 64, N=4))


@pytest.mark.parametrize("decay", [0.0, -1e4, float("-inf")])
def test_uniform_decays(decay):
    x = inputs(1, 130, 2, 2, 64, 64, N=1)
    x["g"].fill_(decay)
    check(x)


def test_runs_of_identical_keys():
    x = inputs(1, 300, 2, 2, 64, 64, N=1)
    x["k"][:, 50:250] = x["k"][:, 50:51]
    check(x)


@pytest.mark.parametrize("T", [1, 7])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_token_by_token(dtype, T):
    x = inputs(3, T, 1, 2, 128, 64, N=3, dtype=dtype)
    got = recurrent_ssd(**x, impl=None)
    double = {name: value.double() for name, value in x.items()}
    exact, eager = (recurrent_ssd(**double, impl="reference"), recurrent_ssd(**x, impl="reference"))
    assert_within("o", got.o, exact.o, eager.o)
    assert_within("final_state", got.final_state, exact.final_state, eager.final_state)


@pytest.mark.parametrize("on_hopper", [True, False])
@pytest.mark.parametrize("steps", [False, True], ids=["", "steps"])
@pytest.mark.parametrize("batch", [1, 32, 128])
def test_decoding_overwrites_the_state(batch, steps, on_hopper):
    x = inputs(batch, 1, 1, 16, 128, 128, N=batch, steps=steps)
    got_state = x.pop("initial_state").contiguous()
    expected_state = got_state.clone()
    token = {name: value if name == "D" else value[:, 0] for name, value in x.items()}
    got = ssd_step(**token, state=got_state, impl=None if on_hopper else "triton")
    # in 16 bits the eager form rounds Δ v
    expected_state = expected_state.double()
    exact = {name: value.double() for name, value in token.items()}
    expected = ssd_step(**exact, state=expected_state, impl="reference")
    assert relative_error(got, expected) < 4e-3
    assert relative_error(got_state, expected_state) < 1e-6


def test_131072_tokens():
    x = inputs(1, 131_072, 1, 1, 64, 64, N=1)
    # recurrent on the CPU takes minutes; the chunkwise float64 reference was compared with it at short lengths
    check(x)


def test_more_than_two_to_the_31_elements():
    T, HV, V, tail = 2**20 + 1000, 16, 128, 1000
    assert T * HV * V > 2**31
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v, do = (torch.randn(1, T, HV, V, generator=generator, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    g = torch.full((1, T, HV), -0.05, device="cuda")
    # nothing passes into the tail, which can then be computed alone
    g[:, -tail] = -1e4
    leaves = [x.requires_grad_() for x in (q, k, v, g)]
    o, _ = chunk_ssd(*leaves, impl=None)
    got = [x[:, -tail:].clone() for x in torch.autograd.grad(o, leaves, do)]
    alone = [x.detach()[:, -tail:].double().requires_grad_() for x in leaves]
    expected_o, _ = chunk_ssd(*alone, impl="reference")
    expected = torch.autograd.grad(expected_o, alone, do[:, -tail:].double())
    assert relative_error(o[:, -tail:], expected_o) < 4e-3
    for name, x, y in zip("qkvg", got, expected, strict=True):
        assert relative_error(x, y) < 4e-3, f"d{name}"


def test_results_never_change_between_runs():
    x = inputs(2, 1000, 1, 16, 128, 64, N=2)
    first, upstream = values_and_gradients(partial(chunk_ssd, impl=None), x)
    for _ in range(5):
        again, _ = values_and_gradients(partial(chunk_ssd, impl=None), x, upstream)
        for name in first:
            assert torch.equal(first[name], again[name]), name


@pytest.mark.parametrize("V", [32, 64])
def test_rows_of_any_length_are_read_right(V):
    x = inputs(2, 100, 1, 2, 128, V, dtype=torch.float16)
    wanted = chunk_ssd(**x)
    for pad in (8, 9):
        sliced = {name: torch.nn.functional.pad(x[name], (0, pad))[..., :128] for name in "qk"}
        got = chunk_ssd(**x | sliced)
        assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


@pytest.mark.parametrize("T", [63, 64, 300])
def test_strong_decays_cancel_at_the_last_token(T):
    x = inputs(2, T, 2, 4, 64, 64, N=2, dtype=torch.float32)
    x["g"] *= 100
    reference = partial(chunk_ssd, impl="reference")
    # kernels scan in an order of their own; gates that did not cancel at the last token erred 80 times as much
    baseline = with_scanned_sums(reference)
    assert_agrees(partial(chunk_ssd, impl=None), reference, x, baseline=baseline, factor=4.0)


def test_a_scale_may_be_an_integer():
    x = inputs(1, 100, 1, 2, 64, 64)
    # kernels are found by the values of numbers, and 2 equals 2.0
    for form in (chunk_ssd, recurrent_ssd):
        assert torch.equal(form(**x, scale=2).o, form(**x, scale=2.0).o)


def train_step(x, upstream, **options):
    o, final_state = chunk_ssd(**x, impl=None, **options)
    return (o, final_state, *torch.autograd.grad([o, final_state], list(x.values()), upstream))


@pytest.mark.parametrize("packed", [False, True])
def test_training_and_decoding_never_stall_the_stream(packed):
    x = {n: value.requires_grad_() for n, value in inputs(1, 1000, 1, 4, 64, 64, N=7 if packed else 1).items()}
    options = {"cu_seqlens": boundaries()} if packed else {}
    upstream = [torch.randn_like(y) for y in chunk_ssd(**x, impl=None, **options)]
    train_step(x, upstream, **options)
    state = torch.zeros(1, 4, 64, 64, device="cuda")
    token = [x[n].detach()[:, 0] for n in "qkvg"]
    ssd_step(*token, state)
    with stalls_forbidden():
        train_step(x, upstream, **options)
        ssd_step(*token, state)


@pytest.mark.parametrize("segment", [0, 256])
def test_forward_and_backward_replay_from_a_graph(segment, override):
    plan_with(override, segment=segment)
    x = {name: value.requires_grad_() for name, value in inputs(1, 1000, 1, 4, 64, 64, N=1).items()}
    upstream = [torch.randn_like(y) for y in chunk_ssd(**x, impl=None)]
    assert_replays(partial(train_step, x, upstream))


def test_every_element_is_written(monkeypatch, override):
    empty, empty_like = torch.empty, torch.empty_like
    poisoned = {
        "empty": lambda *args, **kwargs: empty(*args, **kwargs).fill_(float("nan")),
        "empty_like": lambda *args, **kwargs: empty_like(*args, **kwargs).fill_(float("nan")),
    }
    x = {name: value.requires_grad_() for name, value in inputs(1, 1000, 1, 4, 64, 64, N=7).items()}
    cu_seqlens = boundaries()
    upstream = [torch.randn_like(y) for y in chunk_ssd(**x, cu_seqlens=cu_seqlens, impl=None)]
    for segment in 0, 64:
        plan_with(override, segment=segment)
        with monkeypatch.context() as patch:
            for name, function in poisoned.items():
                patch.setattr(torch, name, function)
            results = train_step(x, upstream, cu_seqlens=cu_seqlens)
        assert all(torch.isfinite(y).all() for y in results)


@pytest.mark.parametrize("form", [chunk_ssd, recurrent_ssd])
def test_compiles_into_one_graph(form):
    x = inputs(2, 100, 1, 4, 64, 64, N=2)
    compiled = torch.compile(partial(form, impl=None), fullgraph=True)
    got, upstream = values_and_gradients(compiled, x)
    expected, _ = values_and_gradients(partial(form, impl=None), x, upstream)
    for name in expected:
        assert relative_error(got[name], expected[name]) < 1e-6, name


def test_custom_ops_pass_torchs_own_checks():
    from tokenmix_core.ops.ssd.autograd import ssd_backward_op, ssd_forward_op, ssd_step_op

    q, k, v, g, state = (value.requires_grad_() for value in inputs(1, 70, 1, 2, 64, 64, N=1).values())
    torch.library.opcheck(ssd_forward_op, (q, k, v, g, state, None, None, None, 1.0))
    q, k, v, g, state = (value.detach() for value in (q, k, v, g, state))
    arguments = (q, k, v, g, state, None, None, None, 1.0)
    torch.library.opcheck(ssd_backward_op, (torch.ones_like(v), state.clone(), None, *arguments))
    torch.library.opcheck(ssd_step_op, (q[:, 0], k[:, 0], v[:, 0], g[:, 0], state, None, None, 1.0))
