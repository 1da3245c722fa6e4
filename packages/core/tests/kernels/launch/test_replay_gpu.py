"""Test replayed calls on a GPU: they give the results of calls that are run, on any thread, stream and device."""

import pytest
import torch

from tokenmix_core.kernels.launch import caching, launcher
from tokenmix_core.kernels.launch.cache import capture
from tokenmix_core.kernels.launch.cache.replay import invalidate
from tokenmix_core.ops import attention, chunk_gated_delta_rule, chunk_ssd, short_conv
from tokenmix_core.testing.closeness import relative_error

pytestmark = pytest.mark.gpu

T, H, D = 200, 4, 64


def gated_delta_rule(q, k, v, g, **packed):
    return chunk_gated_delta_rule(q, k, v, g, g.exp(), qk_l2norm=True, **packed)


def gated_delta_rule_in_groups(q, k, v, g, **packed):
    return chunk_gated_delta_rule(q[:, :, :2], k[:, :, 2:], v, g, g.exp(), qk_l2norm=True, **packed)


def ssd(q, k, v, g, **packed):
    return chunk_ssd(q, k, v, g, **packed)


def ssd_in_groups(q, k, v, g, **packed):
    return chunk_ssd(q[:, :, :1], k[:, :, 1:2], v, g, **packed)


def window(q, k, v, g, **packed):
    return attention(q, k, v, window=50, **packed)


def convolution(q, k, v, g, **packed):
    return short_conv(q.flatten(2), v[0, :4].flatten(1).T, activation="silu", **packed)


OPS = [gated_delta_rule, gated_delta_rule_in_groups, ssd, ssd_in_groups, window, convolution]


def inputs(device="cuda", seed=0):
    generator = torch.Generator(device).manual_seed(seed)
    q, k, v = (torch.randn(1, T, H, D, device=device, generator=generator).bfloat16() for _ in range(3))
    return *(x.requires_grad_() for x in (q, k, v)), -torch.rand(1, T, H, device=device, generator=generator)


def results(op, tensors, **packed):
    """Return both outputs and the gradients of q, k and v."""
    out = op(*tensors, **packed)
    loss = sum(x.float().square().sum() for x in out)
    return [*out, *torch.autograd.grad(loss, tensors[:3], allow_unused=True)]


def check_equal(got, wanted):
    for x, y in zip(got, wanted, strict=True):
        assert (x is None) == (y is None)
        assert x is None or torch.equal(x, y)


def run(op, tensors, **packed):
    """Return the results of calls that are run, not replayed."""
    with caching(False):
        return results(op, tensors, **packed)


@pytest.fixture
def replays(monkeypatch):
    """Return a list with the number of replayed calls."""
    made = [0]
    compiled = capture.compiled

    def counted(*captured):
        call = compiled(*captured)

        def count(*inputs):
            made[0] += 1
            return call(*inputs)

        return count

    invalidate()
    monkeypatch.setattr(capture, "compiled", counted)
    yield made
    invalidate()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("op", OPS)
def test_replays_give_what_runs_give(op, packed, replays):
    boundaries = {"cu_seqlens": torch.tensor([0, 30, 30, 129, T], device="cuda")} if packed else {}
    for seed in range(3):
        check_equal(results(op, inputs(seed=seed), **boundaries), run(op, inputs(seed=seed), **boundaries))
    # the forward and the backward of the second and the third call are replayed
    assert replays[0] >= 4


@pytest.mark.parametrize("op", OPS)
def test_compiled_graphs_replay(op, replays):
    compiled = torch.compile(op)
    for seed in range(3):
        got, wanted = results(compiled, inputs(seed=seed)), run(op, inputs(seed=seed))
        for x, y in zip(got, wanted, strict=True):
            assert x is None or relative_error(x, y) < 8e-3
    # the forward and the backward of the second and the third call are replayed
    assert replays[0] >= 4


@pytest.mark.parametrize("op", OPS)
def test_strides_are_followed(op):
    def strided(seed):
        q, k, v, g = inputs(seed=seed)
        wide = torch.cat([q, k, v], 3).detach()
        return *(x.requires_grad_() for x in wide.split(D, 3)), g

    for seed in range(3):
        for make in (strided, lambda seed: inputs(seed=seed)):
            check_equal(results(op, make(seed)), run(op, make(seed)))


@pytest.mark.parametrize("op", OPS)
def test_tensors_may_begin_anywhere(op):
    tensors = inputs()
    wanted = run(op, tensors)
    # tensors start two or four bytes after a multiple of 16
    beside = [x.new_empty(x.numel() + 1)[1:].view(x.shape).copy_(x.detach()) for x in tensors]
    for _ in range(2):
        got = results(op, (*(x.requires_grad_() for x in beside[:3]), beside[3]))
        for x, y in zip(got, wanted, strict=True):
            assert x is None or relative_error(x, y) < 8e-3


@pytest.mark.parametrize("op", OPS)
def test_one_tensor_for_two_arguments(op):
    for seed in range(3):
        q, k, v, g = inputs(seed=seed)
        check_equal(results(op, (q, q, v, g)), run(op, (q, q, v, g)))
        check_equal(results(op, (q, k, v, g)), run(op, (q, k, v, g)))


@pytest.mark.parametrize("op", OPS)
def test_replays_are_captured_into_a_graph(op, replays):
    tensors = inputs()
    for _ in range(2):
        results(op, tensors)
    before = replays[0]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = results(op, tensors)
    assert replays[0] > before
    with torch.no_grad():
        for x, y in zip(tensors, inputs(seed=5), strict=True):
            x.copy_(y)
    graph.replay()
    check_equal(got, run(op, tensors))


@pytest.mark.parametrize("op", OPS)
def test_replays_follow_the_stream(op):
    tensors = inputs()
    wanted = run(op, tensors)
    results(op, tensors)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        # work on another stream would not wait for this
        torch.cuda._sleep(10_000_000)
        with torch.no_grad():
            late = [x.clone() for x in tensors]
        got = results(op, (*(x.requires_grad_() for x in late[:3]), late[3]))
    torch.cuda.current_stream().wait_stream(stream)
    check_equal(got, wanted)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("op", OPS)
def test_calls_run_on_the_device_of_their_tensors(op):
    wanted = run(op, inputs())
    for _ in range(3):
        for device in ("cuda:0", "cuda:1"):
            tensors = (x.detach().to(device) for x in inputs())
            q, k, v, g = tensors
            got = results(op, (*(x.requires_grad_() for x in (q, k, v)), g))
            check_equal([None if x is None else x.to("cuda:0") for x in got], wanted)


@pytest.mark.parametrize(
    "change",
    [
        lambda q, k, v, g: (q, k.cpu(), v, g),
        lambda q, k, v, g: (q, k.half(), v, g),
        lambda q, k, v, g: (q, k[:, 1:], v, g),
        lambda q, k, v, g: (q, k, v[:, :, :3], g),
    ],
    ids=["device", "dtype", "tokens", "heads"],
)
@pytest.mark.parametrize("op", [gated_delta_rule, ssd, window])
def test_bad_input_is_refused_after_good(op, change):
    q, k, v, g = inputs()
    for _ in range(2):
        results(op, (q, k, v, g))
        bad = change(q, k, v, g)
        with pytest.raises(ValueError, match=r"must|is on"):
            op(*bad)


def test_boundaries_on_another_device_are_refused_after_good_ones():
    boundaries = torch.tensor([0, 30, T], device="cuda")
    for _ in range(2):
        chunk_ssd(*inputs(), cu_seqlens=boundaries)
        with pytest.raises(ValueError, match="is on cpu"):
            chunk_ssd(*inputs(), cu_seqlens=boundaries.cpu())


def test_steps_change_the_state_they_are_given():
    from tokenmix_core.ops import gated_delta_rule_step

    q, k, v, g = (x.detach() for x in inputs())
    state = torch.zeros(1, H, D, D, device="cuda")
    outputs = [gated_delta_rule_step(q[:, t], k[:, t], v[:, t], g[:, t], g[:, t].exp(), state) for t in range(9)]
    invalidate()
    again = torch.zeros_like(state)
    for t, o in enumerate(outputs):
        invalidate()
        assert torch.equal(o, gated_delta_rule_step(q[:, t], k[:, t], v[:, t], g[:, t], g[:, t].exp(), again))
    assert torch.equal(state, again)


@pytest.fixture
def made(monkeypatch):
    """Kernels and options of the launches, and of the foreseen launches that are compiled with them."""
    launched, foreseen, together = [], [], launcher.launch_together

    def seen(launches, later=()):
        launched.extend((kernel.fn, options) for kernel, _, _, options in launches)
        foreseen.extend((kernel.fn, options) for kernel, _, _, options in later)
        return together(launches, later)

    invalidate()
    monkeypatch.setattr(launcher, "launch_together", seen)
    return launched, foreseen


@pytest.mark.parametrize("op", OPS)
def test_the_backward_pass_is_compiled_beside_the_forward_pass(op, made):
    launched, foreseen = made
    tensors = inputs()
    o = op(*tensors)[0]
    assert launched
    launched.clear()
    torch.autograd.grad(o, tensors[:3], torch.randn_like(o), allow_unused=True)
    assert launched
    assert all(x in foreseen for x in launched)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
def test_nothing_is_foreseen_without_gradients(mode, made):
    launched, foreseen = made
    with mode():
        ssd(*(x.detach() for x in inputs()))
    assert launched
    assert not foreseen
