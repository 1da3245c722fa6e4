"""The scorer: the definition, the tokens that a logit depends on, and sequence boundaries in every layer."""

from __future__ import annotations

from itertools import pairwise
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tokenmix_core.ops.dispatch import device_limit
from tokenmix_core.testing.agreement import RoundedProducts, values_and_gradients
from tokenmix_core.testing.closeness import assert_within, relative_error
from tokenmix_core.testing.operations import Call, KernelCase, OpContract
from tokenmix_lte.ops import retention_logits
from tokenmix_lte.ops.scorer.reference import LEVELS, dropout_mask
from tokenmix_lte.scorers import ConvScorer, MlpScorer

H, K = 3, 8


def build(*, causal: bool = False, dropout: float = 0.0) -> ConvScorer:
    torch.manual_seed(0)
    return ConvScorer(H, 2 * K, dropout=dropout, causal=causal).double()


def inputs(B: int = 2, T: int = 30) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(1)
    return tuple(torch.randn(B, T, H, K, dtype=torch.float64, generator=rng) for _ in range(2))


def literal(scorer: ConvScorer, k: Tensor, v: Tensor) -> Tensor:
    """Compute logits by PyTorch's grouped convolutions, with every layer's input padded with zeros."""
    x = torch.cat((k, v), -1).flatten(2).transpose(1, 2)
    left, right = -scorer.offsets[0], scorer.offsets[-1]
    for kernel, bias in zip(scorer.kernels, scorer.biases, strict=True):
        x = F.conv1d(F.pad(x, (left, right)), kernel.flatten(0, 1), bias.flatten(), dilation=2, groups=H)
        x = F.silu(x)
    x = x.unflatten(1, (H, -1))
    return torch.einsum("bhct,hc->bth", x, scorer.weight) + scorer.bias


@pytest.mark.parametrize("causal", [False, True])
def test_logits_and_gradients_agree_with_grouped_convolutions(causal):
    scorer, found = build(causal=causal), []
    for score in (scorer, lambda k, v: literal(scorer, k, v)):
        k, v = (x.requires_grad_() for x in inputs())
        logits = score(k, v)
        weights = torch.linspace(-1, 1, logits.numel(), dtype=logits.dtype).view_as(logits)
        found.append((logits, *torch.autograd.grad((logits * weights).sum(), [k, v, *scorer.parameters()])))
    for got, expected in zip(*found, strict=True):
        assert relative_error(got, expected) < 1e-12


@pytest.mark.parametrize(
    ("causal", "reads"), [(False, {-6, -4, -2, 0, 2, 4, 6}), (True, {-12, -10, -8, -6, -4, -2, 0})]
)
def test_a_logit_depends_on_seven_tokens_at_even_distances(causal, reads):
    scorer, (k, v) = build(causal=causal), inputs(B=1, T=41)
    k.requires_grad_()
    (dk,) = torch.autograd.grad(scorer(k, v)[0, 20].sum(), k)
    assert {int(t) - 20 for t in dk[0].abs().sum((1, 2)).nonzero()} == reads
    assert (-scorer.behind, scorer.ahead) == (min(reads), max(reads))


def test_tokens_before_begin_are_zeros_in_every_layer():
    scorer, (k, v) = build(), inputs(B=2)
    logits = scorer(k, v, begin=torch.tensor([0, 7]))
    assert relative_error(logits[0], scorer(k[:1], v[:1])[0]) < 1e-12
    assert relative_error(logits[1, 7:], scorer(k[1:, 7:], v[1:, 7:])[0]) < 1e-12


def test_heads_have_separate_weights():
    scorer, (k, v) = build(), inputs()
    before = scorer(k, v)
    with torch.no_grad():
        scorer.kernels[1][2] += 1
    after = scorer(k, v)
    assert torch.equal(after[..., :2], before[..., :2])
    assert not torch.equal(after[..., 2], before[..., 2])


def test_logits_are_computed_in_float32_under_autocast():
    scorer, (k, v) = build(), inputs()
    exact = scorer(k.bfloat16().double(), v.bfloat16().double())
    with torch.autocast("cpu", torch.bfloat16):
        logits = scorer.float()(k.bfloat16(), v.bfloat16())
    assert logits.dtype == torch.float32
    assert relative_error(logits, exact) < 1e-6


@pytest.mark.parametrize("kind", ["cnn", "mlp"])
def test_dropout_acts_in_training_alone(kind):
    scorer = build(dropout=0.5) if kind == "cnn" else MlpScorer(H, 2 * K, dropout=0.5).double()
    k, v = inputs()
    scorer.eval()
    assert torch.equal(scorer(k, v), scorer(k, v))
    scorer.train()
    assert not torch.equal(scorer(k, v), scorer(k, v))


def test_nearly_every_key_is_retained_before_training():
    torch.manual_seed(0)
    scorer = ConvScorer(8, 128, dropout=0.1, causal=False).eval()
    k, v = (0.1 * torch.randn(1, 200, 8, 64) for _ in range(2))
    assert (scorer(k, v) > 0).float().mean() > 0.9


def kernel_case(B=1, T=40, heads=2, size=16, device="cpu", seed=0, **options):
    """Return tensors by name, and the call's options."""
    rng = torch.Generator().manual_seed(seed)
    channels = [2 * size >> i for i in range(4)]
    shapes = {"k": (B, T, heads, size), "v": (B, T, heads, size)}
    for i, (C, CO) in enumerate(pairwise(channels)):
        shapes |= {f"w{i}": (heads, CO, C, 3), f"b{i}": (heads, CO)}
    shapes |= {"weight": (heads, channels[-1]), "bias": (heads,)}
    drawn = {name: torch.randn(shape, generator=rng) for name, shape in shapes.items()}
    for i in range(3):
        drawn[f"w{i}"] *= (2 / (3 * channels[i])) ** 0.5
    # k and v have values that float16 represents, too
    return {name: (x.half().float() if name in "kv" else x).to(device) for name, x in drawn.items()}, options


def scored(tensors, options, dtype, wide, impl):
    """Return logits and gradients by name, with k and v in `dtype` and weights in `wide`."""
    leaves = {n: x.to(dtype if n in "kv" else wide).requires_grad_() for n, x in tensors.items()}
    convs = [(leaves[f"w{i}"], leaves[f"b{i}"]) for i in range(3)]
    torch.manual_seed(0)
    logits = retention_logits(leaves["k"], leaves["v"], convs, leaves["weight"], leaves["bias"], impl=impl, **options)
    upstream = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1)).to(logits)
    if "begin" in options:
        exists = (torch.arange(logits.shape[1]) >= options["begin"].cpu()[:, None]).unsqueeze(-1).to(logits)
        logits, upstream = torch.where(exists > 0, logits, 0.0), upstream * exists
    grads = torch.autograd.grad(logits, list(leaves.values()), upstream)
    return {"logits": logits} | {f"d{name}": g for name, g in zip(leaves, grads, strict=True)}


KERNEL_CASES = {
    "two tiles": {"T": 30},
    "dropout": {"B": 2, "T": 9, "dropout": 0.3},
    "dropout, odd keys": {"B": 2, "T": 9, "size": 9, "dropout": 0.3},
    "packed": {"T": 34, "cu_seqlens": torch.tensor([0, 1, 1, 9, 34])},
    "padded": {"B": 2, "T": 26, "begin": torch.tensor([0, 9])},
    "past": {"T": 20, "offsets": (-4, -2, 0)},
    "few channels": {"T": 5, "size": 12},
}


def by_tensors(k, v, weight, bias, w0, b0, w1, b1, w2, b2, convs=None, impl=None, **options):
    """Call the operation with named tensors and a fixed seed; set logits of tokens that do not exist to 0."""
    convs = [(w0, b0), (w1, b1), (w2, b2)] if convs is None else convs
    if "dropout" in options:
        torch.manual_seed(0)
    logits = retention_logits(k, v, convs, weight, bias, impl=impl, **options)
    if "begin" not in options:
        return logits
    exists = torch.arange(logits.shape[1], device=logits.device) >= options["begin"][:, None]
    return torch.where(exists.unsqueeze(-1), logits, 0.0)


def rounding(dtype):
    """Return the tolerance floor: rounding errors of sums over many tokens add up.

    On a GPU, float32 matmuls are sums of three tf32 matmuls without the smallest term, in each of three layers: on an
    H200 the error of logits and gradients was up to 8.2e-7, that of eager ones up to 4e-7.
    """
    return (8 if dtype == torch.float32 else 4) * torch.finfo(dtype).eps


class TestRetentionLogits(OpContract):
    covers = (retention_logits,)
    absent: ClassVar = {
        "parts": "a logit reads tokens on both sides; another test covers parts of a sequence",
        "step": "decoding calls the operation with the tokens that it reads",
        "malformed_steps": "no steps",
    }
    forms: ClassVar = {"scores": by_tensors}
    tokens = ("k", "v")
    shared = ("weight", "bias", "w0", "b0", "w1", "b1", "w2", "b2")
    cases: ClassVar = {"on both sides": dict(B=2, T=30, size=4), "of the past": dict(T=20, size=4, offsets=(-4, -2, 0))}
    lengths = (1, 2, 3, 7, 13)
    kernels: ClassVar = {name: KernelCase(sizes) for name, sizes in KERNEL_CASES.items()}
    packed: ClassVar = {"of documents": dict(T=30, cu_seqlens=torch.tensor([0, 1, 1, 9, 30]))}
    neighbours: ClassVar = dict(B=3, T=5, heads=1)
    laid: ClassVar = {"padded": dict(B=2, T=5, heads=1, begin=torch.tensor([0, 3]))}
    on_gpu: ClassVar = {"heads of 64": dict(B=2, T=150, size=64)}
    traced: ClassVar = dict(B=1, heads=1)
    replayed: ClassVar = dict(T=5, heads=1)
    valid: ClassVar = dict(B=2, T=5)
    malformed: ClassVar = {
        "values of another length": ({"v": torch.zeros(2, 4, 2, 16)}, "v must have shape"),
        "integers": ({"k": torch.zeros(2, 5, 2, 16).long()}, "k must be"),
        "no convolutions": ({"convs": []}, "at least one convolution"),
        "an offset for three taps": ({"offsets": (0,)}, r"convs\[0\]\[0\] must have shape"),
        "weights of other channels": ({"weight": torch.zeros(2, 5)}, "weight must have shape"),
        "beginnings of other rows": ({"begin": torch.zeros(3, dtype=torch.int64)}, "begin must have shape"),
        "packed rows": ({"cu_seqlens": torch.tensor([0, 5])}, "packed batch has B = 1"),
        "all dropped": ({"dropout": 1.0}, "dropout"),
        "a list": ({"k": [1.0]}, "k must be a tensor, got list"),
    }

    def make(self, dtype=torch.float64, device="cpu", seed=0, T=30, **sizes) -> Call:
        tensors, options = kernel_case(T=T, **sizes, device=device, seed=seed)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        tensors = {name: x.to(dtype if name in "kv" else wide) for name, x in tensors.items()}
        return Call(tensors, {n: x.to(device) if isinstance(x, Tensor) else x for n, x in options.items()})

    def named(self, form, name):
        return f"convs[{name[1]}][{'wb'.index(name[0])}]" if name[1:].isdigit() else name

    def definition(self, k, v, weight, bias, w0, b0, w1, b1, w2, b2, *, offsets=(-2, 0, 2)):
        """Compute each layer token by token."""
        x = torch.cat((k, v), -1)
        for w, b in ((w0, b0), (w1, b1), (w2, b2)):
            found = []
            for t in range(x.shape[1]):
                read = [(tap, t + o) for tap, o in enumerate(offsets) if 0 <= t + o < x.shape[1]]
                y = b + sum(torch.einsum("hoc,bhc->bho", w[..., tap], x[:, at]) for tap, at in read)
                found.append(y * y.sigmoid())
            x = torch.stack(found, 1)
        return (x * weight).sum(-1) + bias

    def assert_kernels_agree(self, kernels, reference, call):
        """Compare errors with those of the reference with matmuls in the same dtype."""
        dtype = call.tensors["k"].dtype
        got, upstream = values_and_gradients(kernels, call.tensors)
        exact, _ = values_and_gradients(reference, call.tensors, upstream, dtype=torch.float64)
        with RoundedProducts(dtype):
            eager, _ = values_and_gradients(reference, call.tensors, upstream)
        for name, x in got.items():
            assert x.dtype == (dtype if name in ("dk", "dv") else torch.float32)
            assert_within(name, x, exact[name], eager[name], floor=rounding(dtype))

    def operators(self, device):
        from tokenmix_lte.ops.scorer.autograd import scorer_backward_op, scorer_forward_op

        x, _ = self.make(torch.float32, device, T=3)
        weights = [x[f"{letter}{i}"] for i in range(3) for letter in "wb"]
        arguments = (x["k"], x["v"], *weights, x["weight"], x["bias"], None, None, None, 0, -2, 0, 2, None)
        yield scorer_forward_op, arguments, "test_schema", "test_faketensor"
        dlogits = torch.ones_like(x["k"][..., 0])
        yield scorer_backward_op, (*arguments, dlogits), "test_schema", "test_faketensor"


def unless_on_hopper(impl, device):
    """Skip a test of Gluon kernels on a device that does not run them."""
    if impl == "gluon" and (why := device_limit(torch.device(device))) is not None:
        pytest.skip(why)


FORMS = [
    *(("triton", size, dtype) for size in (16, 48, 64) for dtype in (torch.bfloat16, torch.float16, torch.float32)),
    *(("gluon", 64, dtype) for dtype in (torch.bfloat16, torch.float16)),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("impl", "size", "dtype"), FORMS)
@pytest.mark.parametrize("case", ["two tiles", "dropout", "packed", "padded", "past"])
def test_every_tile_agrees_with_the_reference_on_a_gpu(case, impl, size, dtype, device):
    unless_on_hopper(impl, device)
    options = {**KERNEL_CASES[case], "size": size, "T": 601}
    if "cu_seqlens" in options:
        options["cu_seqlens"] = torch.tensor([0, 1, 1, 9, 340, 601])
    tensors, options = kernel_case(**options, device=device)
    tensors |= {name: tensors[name].bfloat16().float() for name in "kv"}
    options = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in options.items()}
    exact = scored(tensors, options, torch.float64, torch.float64, "reference")
    with RoundedProducts(dtype):
        eager = scored(tensors, options, dtype, torch.float32, "reference")
    for name, x in scored(tensors, options, dtype, torch.float32, impl).items():
        assert_within(name, x, exact[name], eager[name], floor=rounding(dtype))


@pytest.mark.parametrize("impl", ["triton", pytest.param("gluon", marks=pytest.mark.gpu)])
def test_a_logit_is_bit_identical_in_any_part_of_a_sequence(impl, device):
    unless_on_hopper(impl, device)
    tensors, _ = kernel_case(T=60, size=16 if impl == "triton" else 64, device=device)
    k, v = tensors["k"].half(), tensors["v"].half()
    weights = [(tensors[f"w{i}"], tensors[f"b{i}"]) for i in range(3)], tensors["weight"], tensors["bias"]
    whole = retention_logits(k, v, *weights, impl=impl)
    for start, stop in ((0, 27), (11, 52), (30, 60)):
        part = retention_logits(k[:, start:stop], v[:, start:stop], *weights, impl=impl)
        known = slice(6 if start else 0, stop - start - (6 if stop < 60 else 0))
        assert torch.equal(part[:, known], whole[:, start:stop][:, known])


def assert_mean_is_zero(x: Tensor, variance: float) -> None:
    """Assert that the mean of independent samples deviates from 0 by less than five standard errors."""
    assert x.mean().abs() < 5 * (variance / x.numel()) ** 0.5


@pytest.mark.parametrize("probability", [0.1, 0.5])
def test_dropout_masks_have_the_given_probability_and_are_independent(probability):
    x, threshold = torch.zeros(4, 1, 2048, 16), round(probability * LEVELS)
    variance = probability * (1 - probability)
    masks = [dropout_mask(torch.tensor([seed]), threshold, layer, x) for seed in (1, 2) for layer in (0, 1, 2)]
    excess = [mask.double() - (1 - threshold / LEVELS) for mask in masks]
    for i, x in enumerate(excess):
        assert_mean_is_zero(x, variance)
        for channel in x.unbind(-1):
            assert_mean_is_zero(channel, variance)
        for dim, distance in ((0, 1), *((dim, distance) for dim in (2, 3) for distance in (1, 2, 3, 8))):
            first, second = x.narrow(dim, 0, x.shape[dim] - distance), x.narrow(dim, distance, x.shape[dim] - distance)
            assert_mean_is_zero(first * second, variance**2)
        # the two channels of a pair share one hash but must be independent
        assert_mean_is_zero(x[..., ::2] * x[..., 1::2], variance**2)
        for other in excess[:i]:
            assert_mean_is_zero(x * other, variance**2)


@pytest.mark.parametrize("impl", ["reference", "triton", pytest.param("gluon", marks=pytest.mark.gpu)])
def test_both_passes_drop_the_same_elements(impl, device):
    unless_on_hopper(impl, device)
    size = 64 if impl == "gluon" else 16
    tensors, _ = kernel_case(T=9, size=size, device=device)
    k, v = (tensors[name].half() for name in "kv")
    torch.manual_seed(0)
    seed = torch.randint(1 << 31, (1,), device=device)
    mask = dropout_mask(seed, LEVELS // 2, 0, torch.cat((k, v), -1).permute(2, 0, 1, 3), size).permute(1, 2, 0, 3)
    found = []
    for factor in (1, torch.where(mask, 1, 3).half()):
        x = (torch.cat((k, v), -1) * factor).requires_grad_()
        torch.manual_seed(0)
        call = {name: y for name, y in tensors.items() if name not in "kv"}
        logits = by_tensors(*x.split(size, -1), **call, dropout=0.5, impl=impl)
        found.append((logits, *torch.autograd.grad(logits.sum(), x)))
    for x, other in zip(*found, strict=True):
        assert torch.equal(x, other)
    _, dx = found[0]
    assert torch.equal(dx != 0, mask)


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_a_probability_that_rounds_to_0_drops_nothing_and_one_near_1_not_all(impl, device):
    tensors, _ = kernel_case(T=5, device=device)
    logits = [by_tensors(**tensors, impl=impl, dropout=dropout) for dropout in (0.0, 0.4 / LEVELS, 1 - 0.1 / LEVELS)]
    assert torch.equal(logits[0], logits[1])
    assert logits[2].isfinite().all()


def test_unsupported_calls_are_refused_by_kernels_and_run_by_the_reference(device):
    tensors, _ = kernel_case(device=device)
    convs = [(tensors[f"w{i}"][..., :2], tensors[f"b{i}"]) for i in range(3)]
    call = {"offsets": (-1, 0)}
    arguments = tensors["k"], tensors["v"], convs, tensors["weight"], tensors["bias"]
    with pytest.raises(ValueError, match="takes three offsets"):
        retention_logits(*arguments, **call, impl="triton")
    assert retention_logits(*arguments, **call).isfinite().all()
