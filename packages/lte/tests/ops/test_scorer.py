"""The scorer: the definition, what a logit depends on, and borders that no layer reads across."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tokenmix_core.testing.closeness import relative_error
from tokenmix_lte.ops import retention_logits
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
