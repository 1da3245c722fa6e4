"""Test which launches may begin before the preceding one has ended, and that their results are the same."""

import copy

import pytest
import torch

from tokenmix_core.kernels.launch import launcher, pdl
from tokenmix_core.kernels.launch.pdl import pdl_launches
from tokenmix_core.ops import fused_linears, rms_norm, swiglu_linear


class Kernel:
    """A kernel with the parameter PDL; records its compilations."""

    arg_names, __name__ = ("x", "n", "PDL"), "kernel"

    def __init__(self):
        self.compiled = []

    def warmup(self, *args, grid, **options):
        self.compiled.append((args[1:], options))


@pytest.fixture
def launched(monkeypatch):
    """Return `launched(on, *args, **options)`, which launches a kernel and returns its compilation."""
    monkeypatch.setattr(launcher, "_load", lambda *_: None)
    monkeypatch.setattr(launcher, "current_device", lambda: 0)
    monkeypatch.setattr(launcher, "_prepared", list)
    monkeypatch.setattr(launcher.compat, "launching", lambda: object())
    monkeypatch.setattr(Kernel, "__getitem__", lambda *_: lambda *args, **options: None, raising=False)

    def launch(on, *args, **options):
        kernel = Kernel()
        monkeypatch.setattr(pdl.enabled, "on", on)
        launcher._Launcher(kernel)[(1,)](*args, **options)
        return kernel.compiled

    return launch


@pytest.mark.parametrize("named", [False, True])
def test_kernels_that_wait_begin_early_where_it_is_asked_for(launched, named):
    x = torch.zeros(4)
    args, options = ((), dict(n=5, x=x)) if named else ((x, 5), {})
    assert launched(False, *args, num_warps=2, **options) == [((5, False), {"num_warps": 2})]
    assert launched(True, *args, num_warps=2, **options) == [((5, True), {"num_warps": 2, "launch_pdl": True})]
    # options that are handed on are already resolved
    assert launched(True, x, 5, False, num_warps=2) == [((5, False), {"num_warps": 2})]


def test_a_kernel_with_a_parameter_behind_is_refused(launched, monkeypatch):
    monkeypatch.setattr(Kernel, "arg_names", ("x", "PDL", "n"))
    with pytest.raises(TypeError, match="n follows PDL, which must be the last parameter"):
        launched(True, torch.zeros(4), True, 5)


def test_other_kernels_are_launched_as_ever(launched, monkeypatch):
    monkeypatch.setattr(Kernel, "arg_names", ("x", "n"))
    assert launched(True, torch.zeros(4), 5) == [((5,), {})]


@pytest.mark.parametrize(
    ("device", "capability", "driver", "variable", "on"),
    [
        ("cuda", (9, 0), 13_000, None, True),
        ("cuda", (12, 0), 12_030, "1", True),
        ("cuda", (9, 0), 13_000, "0", False),
        ("cuda", (8, 9), 13_000, None, False),
        ("cuda", (9, 0), 12_020, None, False),
        ("cpu", None, None, None, False),
    ],
)
def test_launches_begin_early_inside_the_block_and_where_the_device_can(
    monkeypatch, device, capability, driver, variable, on
):
    pdl._can.cache_clear()
    monkeypatch.setattr(pdl.driver, "version", lambda: driver)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    monkeypatch.delenv("TOKENMIX_PDL", raising=False)
    if variable is not None:
        monkeypatch.setenv("TOKENMIX_PDL", variable)
    with pdl_launches(torch.device(device)):
        assert pdl.enabled.on is on
        with pdl_launches(torch.device("cpu")):
            assert not pdl.enabled.on
        assert pdl.enabled.on is on
    assert not pdl.enabled.on
    pdl._can.cache_clear()


def test_the_switch_takes_two_values(monkeypatch):
    monkeypatch.setenv("TOKENMIX_PDL", "yes")
    with pytest.raises(ValueError, match=r"TOKENMIX_PDL must be 0 .* or 1 .*, got 'yes'"):
        pdl.wanted()


def test_the_former_name_of_the_switch_is_accepted_with_the_new_one(monkeypatch):
    monkeypatch.setenv(pdl._OLD_VARIABLE, "0")
    with pytest.warns(FutureWarning, match="is now called TOKENMIX_PDL"):
        assert not pdl.wanted()


def chain(x, weights, norm):
    """Run layers, each of which reads the result of the preceding one."""
    for up, gate, down in weights:
        a, b = fused_linears(rms_norm(x, norm).y, [gate, up])
        x = swiglu_linear(a, b, down)
        (y,) = fused_linears(rms_norm(x, norm).y, [up])
        x = fused_linears(y, [down])[0] + x
    return x


@pytest.mark.gpu
@torch.no_grad()
@pytest.mark.parametrize("rows", [1, 3])
def test_a_chain_of_early_launches_gives_the_bits_of_one_without(rows):
    torch.manual_seed(0)
    options = dict(device="cuda", dtype=torch.bfloat16)
    weights = [
        [torch.randn(*shape, **options) / 16 for shape in ((512, 256), (512, 256), (256, 512))] for _ in range(4)
    ]
    x, norm = torch.randn(rows, 256, **options), torch.ones(256, **options)
    wanted = chain(x, weights, norm)
    for _ in range(3):
        with pdl_launches(x.device):
            got = chain(x, weights, norm)
        assert torch.equal(got, wanted)
    graph, copied = torch.cuda.CUDAGraph(), copy.deepcopy(x)
    with torch.cuda.graph(graph), pdl_launches(x.device):
        got = chain(copied, weights, norm)
    for factor in (1, 2, 3):
        copied.copy_(x * factor)
        graph.replay()
        assert torch.equal(got, chain(x * factor, weights, norm))
