"""Attention for chosen queries: full attention where it is asked for, nothing elsewhere; kernels against float64."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from tokenmix_core.ops import attention
from tokenmix_core.testing.agreement import assert_agrees, values_and_gradients
from tokenmix_core.testing.closeness import relative_error
from tokenmix_oryx.ops import selected_attention


class Output(NamedTuple):
    o: Tensor


def made(B, TQ, TK, HQ, H, K, V, dtype=torch.float64, device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    shapes = {"q": (B, TQ, HQ, K), "k": (B, TK, H, K), "v": (B, TK, H, V)}
    return {name: torch.randn(s, generator=g, dtype=torch.float64).to(device, dtype) for name, s in shapes.items()}


def chosen(kind, B, T, device="cpu"):
    if kind == "random tokens":
        mask = torch.rand(B, T, generator=torch.Generator().manual_seed(1)) < 0.3
    elif kind == "runs":
        mask = (torch.arange(T).expand(B, T) // 7 + torch.arange(B)[:, None]) % 3 == 0
    else:
        mask = torch.full((B, T), kind == "all")
    return mask.to(device)


KINDS = ["random tokens", "runs", "none", "all"]
BORDERS = [0, 3, 3, 20, 37]


def function(mask, impl, **options):
    return lambda q, k, v: Output(selected_attention(q, k, v, mask, impl=impl, **options))


def full(mask, **options):
    """The specification: all outputs, those not selected struck out."""
    return lambda q, k, v: Output(attention(q, k, v, impl="reference", **options).o * mask[..., None, None])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("impl", ["reference", None])
@pytest.mark.parametrize("form", ["whole", "fewer queries", "packed"])
def test_selected_rows_are_those_of_full_attention_and_others_zero(kind, impl, form):
    TQ, TK = (21, 37) if form == "fewer queries" else (37, 37)
    options = {"cu_seqlens": torch.tensor(BORDERS)} if form == "packed" else {}
    B = 1 if form == "packed" else 2
    x, mask = made(B, TQ, TK, 4, 2, 16, 16), chosen(kind, B, TQ)
    got, upstream = values_and_gradients(function(mask, impl, **options), x)
    exact, _ = values_and_gradients(full(mask, **options), x, upstream)
    for name in exact:
        assert relative_error(got[name], exact[name]) < 1e-12, name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", ["whole", "fewer queries", "packed"])
def test_kernels_agree_with_float64_in_value_and_gradient(kind, form, device):
    TQ, TK = (21, 50) if form == "fewer queries" else (70, 70)
    options = {"cu_seqlens": torch.tensor([0, 5, 5, 40, 70], device=device)} if form == "packed" else {}
    B = 1 if form == "packed" else 2
    x, mask = made(B, TQ, TK, 2, 1, 16, 32, torch.float32, device), chosen(kind, B, TQ, device)
    assert_agrees(function(mask, "triton", **options), full(mask, **options), x)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", ["random tokens", "runs", "none", "all", "chunks"])
@pytest.mark.parametrize("form", ["whole", "fewer queries", "packed"])
def test_kernels_on_a_gpu(kind, form, dtype):
    T = 1000
    TQ, TK = (300, T) if form == "fewer queries" else (T, T)
    options = {"cu_seqlens": torch.tensor([0, 5, 5, 640, T], device="cuda")} if form == "packed" else {}
    B = 1 if form == "packed" else 2
    for sizes in ((4, 4, 128, 128), (4, 2, 64, 64), (2, 1, 96, 80)):
        x = made(B, TQ, TK, *sizes, dtype, "cuda")
        if kind == "chunks":
            draws = torch.rand(B, 8, generator=torch.Generator().manual_seed(2)) < 0.25
            mask = draws.repeat_interleave(128, 1)[:, :TQ].contiguous().cuda()
        else:
            mask = chosen(kind, B, TQ, "cuda")
        assert_agrees(function(mask, "triton", **options), full(mask, **options), x)


def test_queries_that_are_not_selected_are_never_read(device):
    x, mask = made(1, 64, 64, 1, 1, 16, 16, torch.float32, device), chosen("runs", 1, 64, device)
    clean, _ = values_and_gradients(function(mask, "triton"), x)
    x["q"] = x["q"].masked_fill(~mask[..., None, None], 1e4)
    got, _ = values_and_gradients(function(mask, "triton"), x)
    for name in clean:
        assert torch.equal(got[name], clean[name]), name


def test_a_compiled_call_is_one_graph():
    x, mask = made(1, 24, 24, 1, 1, 16, 16, torch.float32), chosen("runs", 1, 24)
    from tokenmix_oryx.ops.selected_queries.autograd import selected_attention_op

    inputs = (*(t.requires_grad_() for t in x.values()), mask, None, 0.25)
    torch.library.opcheck(selected_attention_op, inputs, test_utils=["test_schema", "test_faketensor"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"selected": torch.ones(1, 8)}, "selected must be bool"),
        ({"selected": torch.ones(1, 7, dtype=torch.bool)}, r"selected must have shape \[B, TQ\]"),
        ({"k": torch.zeros(1, 6, 2, 16)}, "k, v must share one dtype|must have shape|at most as many"),
        ({"scale": -1.0}, "scale must be positive"),
        ({"impl": "sdpa"}, "impl must be None or one of"),
        ({"q": torch.zeros(1, 8, 3, 16)}, "HQ must be a multiple of H"),
    ],
)
def test_wrong_calls_are_told(change, message):
    call = {"q": torch.zeros(1, 8, 2, 16), "k": torch.zeros(1, 8, 2, 16), "v": torch.zeros(1, 8, 2, 16)}
    call |= {"selected": torch.ones(1, 8, dtype=torch.bool)} | change
    with pytest.raises(ValueError, match=message):
        selected_attention(**call)


def test_more_queries_than_keys_are_refused():
    q, k = torch.zeros(1, 8, 2, 16), torch.zeros(1, 6, 2, 16)
    with pytest.raises(ValueError, match="at most as many as keys"):
        selected_attention(q, k, k, torch.ones(1, 8, dtype=torch.bool))
