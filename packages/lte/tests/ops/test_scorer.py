"""The scorer: the definition, what a logit depends on, and borders that no layer reads across."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tokenmix_core.testing.agreement import RoundedProducts
from tokenmix_core.testing.closeness import assert_within, relative_error
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
    """PyTorch's own convolutions, a group for each head; zeros are padded to every layer's input."""
    x = torch.cat((k, v), -1).flatten(2).transpose(1, 2)
    left, right = -scorer.offsets[0], scorer.offsets[-1]
    for kernel, bias in zip(scorer.kernels, scorer.biases, strict=True):
        x = F.conv1d(F.pad(x, (left, right)), kernel.flatten(0, 1), bias.flatten(), dilation=2, groups=H)
        x = F.silu(x)
    x = x.unflatten(1, (H, -1))
    return torch.einsum("bhct,hc->bth", x, scorer.weight) + scorer.bias


@pytest.mark.parametrize("causal", [False, True])
def test_logits_are_those_of_grouped_convolutions_in_value_and_gradient(causal):
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


@pytest.mark.parametrize("causal", [False, True])
def test_packed_sequences_are_scored_as_alone(causal):
    scorer, (k, v) = build(causal=causal), inputs(B=1)
    borders = torch.tensor([0, 1, 1, 9, 30])
    packed = scorer(k, v, cu_seqlens=borders)
    alone = [scorer(k[:, i:j], v[:, i:j]) for i, j in ((0, 1), (1, 9), (9, 30))]
    assert relative_error(packed, torch.cat(alone, 1)) < 1e-12


def test_what_lies_before_the_beginning_counts_as_nothing():
    scorer, (k, v) = build(), inputs(B=2)
    logits = scorer(k, v, begin=torch.tensor([0, 7]))
    assert relative_error(logits[0], scorer(k[:1], v[:1])[0]) < 1e-12
    assert relative_error(logits[1, 7:], scorer(k[1:, 7:], v[1:, 7:])[0]) < 1e-12


def test_heads_have_weights_of_their_own():
    scorer, (k, v) = build(), inputs()
    before = scorer(k, v)
    with torch.no_grad():
        scorer.kernels[1][2] += 1
    after = scorer(k, v)
    assert torch.equal(after[..., :2], before[..., :2])
    assert not torch.equal(after[..., 2], before[..., 2])


def test_logits_are_float32_and_exact_to_its_rounding_under_autocast():
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


def test_nearly_every_key_is_kept_at_the_start():
    torch.manual_seed(0)
    scorer = ConvScorer(8, 128, dropout=0.1, causal=False).eval()
    k, v = (0.1 * torch.randn(1, 200, 8, 64) for _ in range(2))
    assert (scorer(k, v) > 0).float().mean() > 0.9


def kernel_case(B=1, T=40, heads=2, size=16, weights=torch.float32, device="cpu", **options):
    """Tensors by name, and the call's options."""
    rng = torch.Generator().manual_seed(0)
    channels = [2 * size >> i for i in range(4)]
    shapes = {"k": (B, T, heads, size), "v": (B, T, heads, size)}
    for i, (C, CO) in enumerate(pairwise(channels)):
        shapes |= {f"w{i}": (heads, CO, C, 3), f"b{i}": (heads, CO)}
    shapes |= {"weight": (heads, channels[-1]), "bias": (heads,)}
    drawn = {name: torch.randn(shape, generator=rng) for name, shape in shapes.items()}
    for i in range(3):
        drawn[f"w{i}"] *= (2 / (3 * channels[i])) ** 0.5
    # numbers that both dtypes hold
    return {name: (x.half().float() if name in "kv" else x).to(device) for name, x in drawn.items()}, options


def scored(tensors, options, dtype, wide, impl):
    """Logits and gradients by name, with k and v in `dtype` and weights in `wide`."""
    leaves = {n: x.to(dtype if n in "kv" else wide).requires_grad_() for n, x in tensors.items()}
    convs = [(leaves[f"w{i}"], leaves[f"b{i}"]) for i in range(3)]
    torch.manual_seed(0)
    logits = retention_logits(leaves["k"], leaves["v"], convs, leaves["weight"], leaves["bias"], impl=impl, **options)
    upstream = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1)).to(logits)
    if "begin" in options:
        there = (torch.arange(logits.shape[1]) >= options["begin"].cpu()[:, None]).unsqueeze(-1).to(logits)
        logits, upstream = torch.where(there > 0, logits, 0.0), upstream * there
    grads = torch.autograd.grad(logits, list(leaves.values()), upstream)
    return {"logits": logits} | {f"d{name}": g for name, g in zip(leaves, grads, strict=True)}


KERNEL_CASES = {
    "two tiles": {"T": 30},
    "dropout": {"B": 2, "T": 9, "dropout": 0.3},
    "packed": {"T": 34, "cu_seqlens": torch.tensor([0, 1, 1, 9, 34])},
    "padded": {"B": 2, "T": 26, "begin": torch.tensor([0, 9])},
    "past": {"T": 20, "offsets": (-4, -2, 0)},
    "few channels": {"T": 5, "size": 12},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
@pytest.mark.parametrize("case", KERNEL_CASES)
def test_kernels_agree_with_the_reference_in_value_and_gradient(case, dtype, device):
    tensors, options = kernel_case(**KERNEL_CASES[case], device=device)
    options = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in options.items()}
    exact = scored(tensors, options, torch.float64, torch.float64, "reference")
    with RoundedProducts(dtype):
        eager = scored(tensors, options, dtype, torch.float32, "reference")
    got = scored(tensors, options, dtype, torch.float32, "triton")
    for name, x in got.items():
        assert x.dtype == (dtype if name in ("dk", "dv") else torch.float32)
        # what is summed over many tokens is rounded for each of them
        assert_within(name, x, exact[name], eager[name], floor=4 * torch.finfo(dtype).eps)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("size", [16, 64, 96, 128])
@pytest.mark.parametrize("case", ["two tiles", "dropout", "packed", "padded", "past"])
def test_every_tile_agrees_with_the_reference_on_a_gpu(case, size, dtype, device):
    options = {**KERNEL_CASES[case], "size": size, "T": 601}
    if "cu_seqlens" in options:
        options["cu_seqlens"] = torch.tensor([0, 1, 1, 9, 340, 601])
    tensors, options = kernel_case(**options, device=device)
    tensors |= {name: tensors[name].bfloat16().float() for name in "kv"}
    options = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in options.items()}
    exact = scored(tensors, options, torch.float64, torch.float64, "reference")
    with RoundedProducts(dtype):
        eager = scored(tensors, options, dtype, torch.float32, "reference")
    for name, x in scored(tensors, options, dtype, torch.float32, "triton").items():
        assert_within(name, x, exact[name], eager[name], floor=4 * torch.finfo(dtype).eps)


def test_a_logit_is_the_same_number_in_any_piece(device):
    tensors, _ = kernel_case(T=60, device=device)
    k, v = tensors["k"].half(), tensors["v"].half()
    weights = [(tensors[f"w{i}"], tensors[f"b{i}"]) for i in range(3)], tensors["weight"], tensors["bias"]
    whole = retention_logits(k, v, *weights, impl="triton")
    for start, stop in ((0, 27), (11, 52), (30, 60)):
        piece = retention_logits(k[:, start:stop], v[:, start:stop], *weights, impl="triton")
        known = slice(6 if start else 0, stop - start - (6 if stop < 60 else 0))
        assert torch.equal(piece[:, known], whole[:, start:stop][:, known])


def test_dropout_drops_as_often_as_it_says_and_enlarges_the_rest():
    x = torch.zeros(4, 2, 300, 16)
    masks = [dropout_mask(torch.tensor([seed]), round(0.3 * LEVELS), layer, x) for seed in (1, 2) for layer in (0, 1)]
    for mask in masks:
        assert abs(mask.float().mean() - 0.7) < 0.01
        for dim in (0, 2, 3):
            near = mask.float().flatten().var(correction=0) * 0.1
            pairs = mask.unfold(dim, 2, 1).float() - 0.7
            assert pairs.prod(-1).mean().abs() < near
    for i, mask in enumerate(masks):
        assert all(abs((mask & other).float().mean() - 0.49) < 0.01 for other in masks[:i])


def test_what_the_kernels_do_not_take_is_refused_and_left_to_the_reference(device):
    tensors, _ = kernel_case(device=device)
    convs = [(tensors[f"w{i}"][..., :2], tensors[f"b{i}"]) for i in range(3)]
    call = {"offsets": (-1, 0)}
    arguments = tensors["k"], tensors["v"], convs, tensors["weight"], tensors["bias"]
    with pytest.raises(ValueError, match="takes three offsets"):
        retention_logits(*arguments, **call, impl="triton")
    assert retention_logits(*arguments, **call).isfinite().all()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"v": torch.zeros(2, 29, H, K)}, "v must have shape"),
        ({"k": torch.zeros(2, 30, H, K).long()}, "k must be"),
        ({"convs": []}, "at least one convolution"),
        ({"offsets": (0,)}, r"convs\[0\]\[0\] must have shape"),
        ({"weight": torch.zeros(H, 5)}, "weight must have shape"),
        ({"begin": torch.zeros(3, dtype=torch.int64)}, "begin must have shape"),
        ({"cu_seqlens": torch.tensor([0, 30])}, "packed batch has B = 1"),
        ({"dropout": 1.0}, "dropout"),
    ],
)
def test_malformed_calls_are_refused(changes, words):
    scorer = build().float()
    k, v = (x.float() for x in inputs())
    call = {
        "k": k,
        "v": v,
        "convs": list(zip(scorer.kernels, scorer.biases, strict=True)),
        "weight": scorer.weight,
        "bias": scorer.bias,
    }
    with pytest.raises(ValueError, match=words):
        retention_logits(**{**call, **changes})
