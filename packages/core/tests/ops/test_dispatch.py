"""Test which kernels run: plans by shape on a device treated as Hopper, refusals, and kernels that do not compile."""

from __future__ import annotations

import sys
import warnings
from types import ModuleType, SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from triton.errors import TritonError
from triton.runtime.errors import OutOfResources

from tokenmix_core.kernels import tuning
from tokenmix_core.kernels.launch.errors import NotCompiled, compiling
from tokenmix_core.ops import (
    attention,
    chunk_gated_delta_rule,
    chunk_ssd,
    dispatch,
    explain,
    gated_delta_rule_step,
    registry,
    short_conv,
    ssd_step,
)
from tokenmix_core.ops.dispatch import GluonForm
from tokenmix_core.ops.explanation import OPERATIONS
from tokenmix_core.ops.gated_delta_rule import autograd, hopper
from tokenmix_core.ops.gated_delta_rule import plan as delta_rule_plan
from tokenmix_core.ops.gated_delta_rule.prepare import prepare as portable_prepare
from tokenmix_core.ops.softmax_attention import plan as attention_plan
from tokenmix_core.ops.softmax_attention.api import _resolve as resolve_attention
from tokenmix_core.ops.softmax_attention.tuning import attention as attention_tile
from tokenmix_core.ops.softmax_attention.types import Call, Mask
from tokenmix_core.ops.sparse_attention import plan as kept_plan
from tokenmix_core.ops.ssd import plan as ssd_plan

GLUON = delta_rule_plan.GLUON
BFLOAT16 = torch.bfloat16


def empty(*shape, dtype=BFLOAT16):
    """Return a tensor of this shape without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.fixture
def hopper_device(monkeypatch, override):
    """Treat every device as a Hopper GPU with 132 SMs."""
    monkeypatch.setattr(dispatch, "device_limit", lambda device: None)
    override(tuning, sm_count=lambda device: 132)


@pytest.fixture(autouse=True)
def nothing_given_up(monkeypatch):
    """Restore, after a test, the Gluon kernels that it has disabled."""
    for form in dispatch._forms:
        monkeypatch.setattr(form, "failure", None)
        monkeypatch.setattr(form, "_warned", False)


# K, V, whether q and k are normalised; then prepare, outputs, states, remainders, at once, reverse and chunks
DELTA_RULE = [
    ((128, 128, True), ("gluon", "gluon", "gluon", False, True, "gluon", "gluon")),
    ((128, 128, False), ("gluon", "gluon", "gluon", False, False, "gluon", "triton")),
    ((64, 64, True), ("gluon", "triton", "triton", False, False, "gluon", "gluon")),
    ((64, 128, True), ("gluon", "triton", "triton", True, False, "gluon", "gluon")),
    ((128, 64, True), ("gluon", "gluon tiled", "gluon tiled", True, False, "gluon tiled", "gluon")),
    ((64, 256, True), ("gluon", "triton", "triton", True, False, "gluon tiled", "gluon tiled")),
    ((256, 256, True), ("gluon", "gluon tiled", "gluon tiled", True, False, "gluon tiled", "gluon tiled")),
    ((256, 128, False), ("gluon", "gluon tiled", "gluon tiled", True, False, "gluon tiled", "triton")),
]


def of_delta_rule(K, V, qk_l2norm=True, impl=None, B=8, T=4096, HV=16, dtype=BFLOAT16, **options):
    k, v = empty(B, T, 16, K, dtype=dtype), empty(B, T, HV, V, dtype=dtype)
    return delta_rule_plan.plan(k, v, None, qk_l2norm, impl, **options)


@pytest.mark.parametrize(("call", "forms"), DELTA_RULE, ids=str)
def test_the_delta_rules_steps_on_hopper_follow_head_sizes_and_norm(call, forms, hopper_device):
    plan = of_delta_rule(*call)
    got = plan.prepare, plan.outputs, plan.states, plan.remainders, plan.fused_backward, *plan[-2:]
    assert got == forms
    assert not plan.saves_states


def test_the_delta_rules_cuts_follow_the_programs_there_are(hopper_device):
    assert of_delta_rule(128, 128).segment == 0
    few = of_delta_rule(128, 128, B=1, T=32768)
    assert (few.segment, few.backward_segment, few.fused_backward) == (4096, 4096, True)
    # heads of 256 are shared out by 64 columns, as many programs as there are
    wide = of_delta_rule(256, 256, B=1, T=32768)
    assert (wide.segment, of_delta_rule(256, 256, B=1, T=32768, impl="triton").segment) == (16384, 4096)
    # 16 programs leave most of a GPU idle: two steps
    small = of_delta_rule(128, 128, B=1, T=512)
    assert (small.fused_backward, small.saves_states) == (False, True)


def test_the_delta_rule_runs_without_gluon_where_it_takes_no_such_tensors(hopper_device):
    portable = of_delta_rule(128, 128, impl="triton")
    assert (portable.prepare, portable.outputs, portable.states, *portable[-2:]) == ("triton",) * 5
    assert portable.remainders
    assert not of_delta_rule(128, 128, dtype=torch.float32).remainders
    assert of_delta_rule(128, 128, dtype=torch.float32)._replace(remainders=True) == portable
    # only the final states have gradients
    ends = of_delta_rule(128, 128, has_do=False)
    assert (ends.states, ends.remainders, *ends[-2:]) == ("gluon tiled", True, "triton", "triton")


@pytest.mark.parametrize("K", [16, 64, 128, 256])
@pytest.mark.parametrize("T", [300, 4096, 32768])
def test_ssds_segments_are_those_of_every_device(K, T, hopper_device):
    q, v = empty(1, T, 1, K), empty(1, T, 16, 64)
    fast, portable = (ssd_plan.plan(q, v, None, impl) for impl in (None, "triton"))
    assert fast.segment == portable.segment
    assert (fast.forward.hopper, fast.gradients.hopper is not None) == (64 * (K >= 64), K in (64, 128))
    assert (portable.forward.hopper, portable.forward.lookback, portable.gradients.hopper) == (0, 0, None)


ONE, GROUPS = attention_plan.Form
# batch, head size, tokens, window: what makes the output, dq, and dk with dv
ATTENTION = [
    ((8, 128, 4096, 1024), (GROUPS, ONE, ONE)),
    ((8, 128, 4096, 2048), (GROUPS, ONE, ONE)),
    ((8, 128, 4096, 512), (ONE, ONE, ONE)),
    ((8, 128, 4096, 256), (ONE, ONE, ONE)),
    ((8, 128, 4096, None), (GROUPS, ONE, ONE)),
    # calls with few blocks
    ((1, 128, 1024, None), (GROUPS, ONE, ONE)),
    ((1, 128, 1024, 512), (ONE, ONE, ONE)),
    ((1, 128, 512, None), (ONE, ONE, ONE)),
    # calls with short rows
    ((64, 128, 512, None), (ONE, ONE, ONE)),
    ((64, 128, 512, 128), (ONE, ONE, ONE)),
    ((8, 64, 4096, 1024), (ONE, ONE, ONE)),
    # dQ of narrow heads has too few programs for the Gluon kernel
    ((1, 64, 4096, 1024), (ONE, None, ONE)),
    ((8, 64, 4096, None), (ONE, None, ONE)),
    ((8, 96, 4096, 1024), (None, None, None)),
    ((8, 256, 4096, 1024), (None, None, None)),
]


@pytest.mark.parametrize(("call", "forms"), ATTENTION, ids=str)
def test_attentions_kernels_on_hopper_follow_heads_windows_and_blocks(call, forms, hopper_device):
    B, K, T, window = call
    x = [empty(B, T, 16, K) for _ in range(4)]
    mask = Mask(True, window, 0)
    plan = attention_plan.plan(*x[:3], mask, None, x[3])
    assert tuple(made if isinstance(made, attention_plan.Form) else None for made in plan) == forms
    portable = attention_plan.plan(*x[:3], mask, "triton", x[3])
    assert portable.forward == attention_tile("forward", K, BFLOAT16)
    # bias columns of 16 bits cannot represent values divided by this scale
    assert not isinstance(attention_plan.plan(*x[:3], mask, None, x[3], scale=1e-30).keys, attention_plan.Form)
    # of chosen queries these kernels know nothing, and many short sequences are not long ones
    chosen = attention_plan.plan(*x[:3], mask, None, x[3], chosen=True)
    assert not isinstance(chosen.forward, attention_plan.Form)
    short = attention_plan.plan(*x[:3], mask, None, x[3], cu_seqlens=torch.arange(0, T + 1, 512))
    assert GROUPS not in (*chosen, *short)


@pytest.mark.parametrize(("K", "V", "asked"), [(64, 64, False), (64, 128, False), (128, 128, True)])
def test_kept_keys_of_64_run_in_gluon_by_themselves_and_of_128_where_asked_for(K, V, asked, hopper_device):
    q, k, v = empty(1, 128, 4, K), empty(1, 128, 2, K), empty(1, 128, 2, V)
    assert kept_plan.takes_gluon(None, q, k, v, None) is not asked
    assert kept_plan.takes_gluon("gluon", q, k, v, None)
    assert not kept_plan.takes_gluon("triton", q, k, v, None)


def delta_rule_inputs(K=128, V=128, dtype=BFLOAT16):
    x = [torch.randn(1, 20, 1, size).to(dtype) for size in (K, K, V)]
    return *x, -torch.rand(1, 20, 1), torch.rand(1, 20, 1)


def token(K, V, gates):
    q, k, v, *rest = delta_rule_inputs(K, V)
    return *(x[:, 0] for x in (q, k, v, *rest[:gates])), torch.zeros(1, 1, K, V)


# what each operation's kernels in Gluon cannot take, on a device that has them
LIMITS = {
    "float32": (lambda: chunk_gated_delta_rule(*delta_rule_inputs(dtype=torch.float32), impl="gluon"), "float32"),
    "one token of heads of 64": (lambda: gated_delta_rule_step(*token(64, 64, 2), impl="gluon"), "K = 128"),
    "SSD of heads of 16": (lambda: chunk_ssd(*delta_rule_inputs(16, 64)[:4], impl="gluon"), "K=16"),
    "SSD, one token of heads of 64": (lambda: ssd_step(*token(64, 64, 1), impl="gluon"), "K = 128"),
    "attention of heads of 96": (lambda: attention(*[torch.randn(1, 9, 2, 96).to(BFLOAT16)] * 3, impl="gluon"), "K=96"),
    "attention, unaligned": (
        lambda: attention(*[torch.randn(1, 9, 2, 72).to(BFLOAT16)[..., 8:]] * 3, impl="gluon"),
        "multiples of 16",
    ),
}


@pytest.mark.parametrize("name", LIMITS)
def test_gluon_asked_for_where_it_does_not_run_is_an_error_that_says_why(name, hopper_device):
    call, why = LIMITS[name]
    with pytest.raises(ValueError, match=rf"impl='gluon'.*{why}.*pass impl='triton'"):
        call()


def test_gluon_asked_for_on_another_device_is_an_error():
    with pytest.raises(ValueError, match=r"chunk_ssd: impl='gluon' needs a CUDA device.*Hopper.*, got cpu; pass impl="):
        chunk_ssd(*delta_rule_inputs()[:4], impl="gluon")


def test_the_short_convolution_says_that_it_has_no_kernels_in_gluon():
    with pytest.raises(ValueError, match=r"short_conv: impl='gluon'.*no kernels in Gluon; pass impl='triton'"):
        short_conv(torch.ones(1, 4, 8), torch.ones(8, 4), impl="gluon")


def kernel(gluon=True, module=hopper.__name__):
    return SimpleNamespace(is_gluon=lambda: gluon, __name__="forward_kernel", __module__=f"{module}.forward")


@pytest.mark.parametrize(
    "error", [TritonError("x = y\nno"), OutOfResources(9, 1, "x"), RuntimeError("PassManager::run failed")]
)
def test_what_the_compiler_says_of_a_kernel_in_gluon_is_told_apart(error):
    with pytest.raises(NotCompiled, match="forward_kernel does not compile") as raised, compiling(kernel()):
        raise error
    assert raised.value.module == f"{hopper.__name__}.forward"


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("CUDA error: 700")])
def test_memory_and_devices_that_fail_are_nothing_of_the_compiler(error):
    with pytest.raises(type(error)) as raised, compiling(kernel()):
        raise error
    assert raised.value is error


def test_a_portable_kernel_that_does_not_compile_says_so_itself():
    with pytest.raises(TritonError), compiling(kernel(gluon=False)):
        raise TritonError("no")


@pytest.fixture
def steps(monkeypatch):
    """Let the first Gluon step of the delta rule run and others fail to compile; return the list of steps that ran."""
    ran = []

    def fails(*args, **options):
        ran.append("fails")
        with compiling(kernel()):
            raise TritonError("no such layout")

    def prepare(inverse, gates, **inputs):
        ran.append("prepare")
        portable_prepare(**inputs, form="triton", out=(inverse, gates))

    modules = {"prepare": prepare, "forward_tiled": fails, "backward_state": fails}
    for name, step in modules.items():
        module = SimpleNamespace(**{name: step})
        monkeypatch.setitem(sys.modules, f"{hopper.__name__}.{name}", module)
        monkeypatch.setattr(hopper, name, module, raising=False)
    monkeypatch.setattr(GluonForm, "limit", lambda *_: None)
    return ran


def run(impl, K=64):
    """Values and gradients; with keys of 128 outputs come from tiles in Gluon, which do not compile."""
    torch.manual_seed(0)
    x = [t.requires_grad_() for t in delta_rule_inputs(K, 64, torch.float32)]
    o, state = autograd.chunk(*x, None, None, None, 0.1, True, impl)
    return o, state, *torch.autograd.grad(o.sum() + state.sum(), x)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the steps are put in place of those in Gluon on a CPU")
@pytest.mark.parametrize("K", [64, 128], ids=["the backward pass", "the forward pass"])
def test_portable_kernels_take_over_from_those_that_do_not_compile_and_say_so_once(K, steps):
    expected = run("triton", K)
    assert not steps
    with pytest.warns(UserWarning, match=r"gated_delta_rule: with Triton .*forward_kernel does not compile: no such"):
        got = run(None, K)
    assert steps == ["prepare", "fails"]
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(None, K)
    assert steps == ["prepare", "fails"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the steps are put in place of those in Gluon on a CPU")
def test_gluon_asked_for_that_does_not_compile_is_an_error(steps):
    # the second call raises the error without compiling again
    for _ in range(2):
        with pytest.raises(NotCompiled, match=r"impl='gluon' was asked for.*no such layout; pass impl='triton'"):
            run("gluon", 128)
    assert steps == ["prepare", "fails"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the steps are put in place of those in Gluon on a CPU")
def test_names_that_gluon_no_longer_has_are_like_kernels_that_do_not_compile(steps, monkeypatch):
    monkeypatch.delitem(sys.modules, f"{hopper.__name__}.prepare")
    monkeypatch.delattr(hopper, "prepare")
    name = "tokenmix_core.kernels.gluon.hopper"
    monkeypatch.setitem(sys.modules, name, ModuleType(name))
    with pytest.warns(UserWarning, match="cannot import name"):
        run(None)
    assert not steps
    assert "cannot import name" in (GLUON.failure or "")


def test_other_failures_of_imports_and_attributes_are_raised():
    def fails(x):
        raise AttributeError("mine")

    with pytest.raises(AttributeError, match="mine"):
        autograd.retried(fails)(torch.ones(1))


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a CPU runs")
@pytest.mark.parametrize("name", OPERATIONS)
def test_every_operation_explains_what_runs_on_a_cpu(name):
    told = explain(name)
    assert told.impl == ("sdpa" if name == "attention" else "reference")
    assert name in str(told)
    assert "bfloat16 on cpu" in str(told)


def test_an_explanation_follows_example_tensors_and_sizes():
    x = delta_rule_inputs(64, 256, torch.float16)
    told = explain(chunk_gated_delta_rule, *x[:3])
    assert "T=20" in told.call
    assert "V=256, float16" in told.call
    assert "K=32" in explain("chunk_ssd", sizes={"K": 32}).call


@pytest.mark.skipif(torch.cuda.is_available(), reason="a step is asked for on a CPU taken for a Hopper GPU")
def test_an_explanation_names_the_kernels_of_each_step_and_what_is_missing(hopper_device, monkeypatch):
    told = explain(chunk_ssd, impl="gluon")
    assert told.impl == "gluon"
    assert told.kernels["gradients"].startswith("gluon")
    told = explain(chunk_gated_delta_rule, sizes={"K": 256}, impl="gluon")
    assert told.kernels["outputs"] == "gluon tiled"


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_operation_explains_what_runs_on_a_chip_that_is_not_here(name, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    told = explain(name, chip="sm_89")
    assert told.impl == "triton"
    assert "bfloat16 on sm_89, where no test has run" in str(told)
    told = explain(name, chip="sm_90")
    assert told.impl == ("triton" if OPERATIONS[name].gluon is None else "gluon")
    assert told.call.endswith("on sm_90")


def test_an_explanation_of_a_chip_follows_the_limits_of_kernels():
    assert explain(chunk_ssd, dtype=torch.float32, chip="sm_90").impl == "triton"
    with pytest.raises(ValueError, match="takes head sizes up to 256"):
        explain(attention, sizes={"K": 512}, chip="sm_89")


@pytest.mark.parametrize("whose", ["sdpa", None])
def test_an_explanation_of_attention_names_whose_gradients_follow_our_outputs(whose, hopper_device, monkeypatch):
    monkeypatch.setattr(registry, "implementation_of_attention", lambda *call: None)
    monkeypatch.setattr(registry, "backward_impl", lambda impl, call, through_lse: whose)
    told = explain(attention)
    ours = {"gradients of queries": "gluon", "gradients of keys and values": "gluon"}
    assert told.kernels == {"outputs": "gluon"} | ({"gradients": whose} if whose else ours)
    assert told.impl == "gluon"


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (lambda: explain("chunk_nothing"), "must be one of chunk_gated_delta_rule, .*, got chunk_nothing"),
        (lambda: explain(chunk_ssd, sizes={"X": 1}), "has sizes B, T, .*, got X"),
        (lambda: explain(chunk_ssd, device="cuda:99"), "cuda:99 is not here"),
        (lambda: explain(chunk_ssd, chip="sm_70"), "chip must be one of sm_80"),
        (lambda: explain(chunk_ssd, chip="sm_80", device="cpu"), "pass a chip or a device"),
        (lambda: explain(chunk_ssd, torch.ones(2)), "q must have shape"),
        (lambda: explain(short_conv, impl="gluon"), "no kernels in Gluon"),
    ],
)
def test_what_cannot_be_explained_is_refused(call, why):
    with pytest.raises(ValueError, match=why):
        call()


def test_a_reference_instead_of_kernels_warns_once_by_name():
    dispatch._warn_of_reference.cache_clear()
    large = Call("cuda", torch.bfloat16, 64, 64, 512, 512, Mask(True, None, 0))
    with pytest.warns(
        RuntimeWarning, match="attention: impl='triton' takes head sizes up to 256, got K=512 and V=512: "
    ):
        assert resolve_attention("attention", None, large) == "reference"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resolve_attention("attention", None, large)
        # on a CPU and for float64 the reference is expected, so there is no warning
        resolve_attention("attention", None, large._replace(device="cpu"))
        resolve_attention("attention", None, large._replace(dtype=torch.float64))
