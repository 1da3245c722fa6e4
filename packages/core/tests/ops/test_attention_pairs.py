"""Test gradients of attention by each implementation's backward after each other's forward, in all layouts."""

from __future__ import annotations

import pytest
import torch

from tokenmix_core.ops.softmax_attention import attention_reference
from tokenmix_core.ops.softmax_attention.backends import IMPLS, flash_attention, limit
from tokenmix_core.ops.softmax_attention.implementations import load
from tokenmix_core.ops.softmax_attention.plan import GLUON
from tokenmix_core.ops.softmax_attention.plan import limit as limit_of_gluon
from tokenmix_core.ops.softmax_attention.types import Mask, call_of
from tokenmix_core.testing.closeness import relative_error
from tokenmix_core.testing.layouts import LAYOUTS, copies

pytestmark = pytest.mark.operation

GPU = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.bfloat16) if GPU else ("cpu", torch.float32)
# causal calls that all implementations take: grouped heads of sizes that cuDNN and Gluon have kernels for
SIZES = {f"heads of {K}": dict(T=300, K=K) for K in (64, 128)} if GPU else {"heads of 16": dict(T=9, K=16)}
MASKS = {"causal": Mask(True, None, 0), "window": Mask(True, 5, 0)}
# test fewer layouts on a CPU, to save time
TITLES = [*LAYOUTS] if GPU else ["transposed", "every second element", "expanded"]
SCALE = 0.2


def inputs(T, K, B=2, HQ=4, H=2):
    generator = torch.Generator().manual_seed(0)
    shapes = {"q": (B, T, HQ, K), "k": (B, T, H, K), "v": (B, T, H, K), "do": (B, T, HQ, K), "dlse": (B, HQ, T)}
    return {name: torch.randn(s, generator=generator).to(DEVICE, DTYPE) for name, s in shapes.items()}


def runs(impl: str, q, k, v, mask: Mask) -> bool:
    if impl == "gluon":
        return GLUON.limit(q.device, q.dtype) is None and limit_of_gluon(q, k, v) is None
    return limit(impl, call_of(q, k, v, mask, packed=False)) is None


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("backward", IMPLS)
def test_gradients_do_not_depend_on_the_forward_or_on_layouts(backward, mask, size):
    x, mask = inputs(**SIZES[size]), MASKS[mask]
    if not runs(backward, x["q"], x["k"], x["v"], mask):
        pytest.skip(f"{backward} does not run here")
    with_lse = backward not in ("sdpa", "flash_attn") or (backward == "flash_attn" and flash_attention() == 4)
    for forward in IMPLS:
        if not runs(forward, x["q"], x["k"], x["v"], mask):
            continue
        for title in TITLES:
            layout = LAYOUTS[title]
            if "another dtype" in title:
                # autograd converts gradients to the dtype of outputs
                continue
            arguments = layout.arguments({name: x[name] for name in "qkv"})
            upstream = layout.gradients({name: x[name] for name in ("do", "dlse")})
            # the log-sum-exp is float32 for all dtypes of q, k and v
            do, dlse = upstream["do"], layout.gradients({"dlse": x["dlse"].float()})["dlse"]
            if not all(runs(impl, **arguments, mask=mask) for impl in (forward, backward)):
                # this implementation refuses arguments of this layout, and the default never selects it for them
                continue
            options = {"cu_seqlens": None, "mask": mask, "scale": SCALE}
            o, lse = (t.contiguous() for t in load(forward).forward(**arguments, **options))
            for through_lse in (False, True) if with_lse else (False,):
                got = load(backward).backward(
                    **arguments, o=o, lse=lse, do=do, dlse=dlse if through_lse else None, **options
                )
                wanted = exact(copies(arguments), do, dlse if through_lse else None, mask)
                for name, grad, right in zip("qkv", got, wanted, strict=True):
                    error = relative_error(grad, right)
                    assert error < (2e-2 if GPU else 1e-5), f"{forward}, {title}, {through_lse}: d{name} {error:.1e}"


def test_a_gradient_that_begins_anywhere_is_copied_for_kernels_that_take_the_other_tensors(monkeypatch):
    """Gluon kernels refuse arguments of this layout, but the caller does not determine that of a gradient."""
    pytest.importorskip("triton")
    from tokenmix_core.ops.softmax_attention import backward

    x = {name: tensor.to(torch.bfloat16) for name, tensor in inputs(T=5, K=64, B=1).items()}
    do = LAYOUTS["offset"].gradients({"do": x["do"]})["do"]
    planned: list[str | None] = []

    def stop(q, k, v, mask, impl, do, **options):
        planned.append(limit_of_gluon(q, k, v, do))
        raise StopIteration

    assert limit_of_gluon(x["q"], x["k"], x["v"], do) is not None
    monkeypatch.setattr(backward, "plan", stop)
    o, lse = torch.empty_like(x["q"]), torch.zeros(1, 4, 5, device=DEVICE)
    with pytest.raises(StopIteration):
        backward.attention_backward(x["q"], x["k"], x["v"], o, lse, do, None, None, MASKS["causal"], SCALE)
    assert planned == [None]


def exact(x, do, dlse, mask: Mask):
    leaves = [t.double().requires_grad_() for t in x.values()]
    out = attention_reference(*leaves, scale=SCALE, **mask._asdict())
    upstream = [do.double()] if dlse is None else [do.double(), dlse.double().transpose(1, 2)]
    return torch.autograd.grad(list(out)[: len(upstream)], leaves, upstream)
