"""Test the strides that cuDNN's attention gets, by an emulator of torch's cache of cuDNN graphs."""

from __future__ import annotations

import types

import pytest
import torch
from torch import Tensor

from tokenmix_core.ops.softmax_attention import attention_reference, sdpa
from tokenmix_core.ops.softmax_attention.flash import readable
from tokenmix_core.ops.softmax_attention.reference import attention_reference_backward
from tokenmix_core.testing.closeness import relative_error


class Cudnn:
    """Emulates torch's two operators of cuDNN's attention: correct if all calls with one cached graph have its strides.

    torch finds a graph by the sizes and strides of q, k and v. The graph keeps the strides that o and do had when it
    was built; the graph of contiguous `[B, T, H, K]` tensors is built with the strides of o for do.
    """

    def __init__(self) -> None:
        self.graphs: dict[tuple, tuple[tuple, tuple]] = {}
        self.given: dict[str, Tensor] = {}

    def _scaled_dot_product_cudnn_attention(self, q, k, v, bias, lse, dropout, causal, *, scale):
        assert all(x.data_ptr() % 16 == 0 and x.stride(-1) == 1 for x in (q, k, v))
        o, lse = attention_reference(*(x.transpose(1, 2) for x in (q, k, v)), causal=causal, scale=scale)
        # o has the memory order of q
        order = sorted(range(4), key=lambda axis: -q.stride(axis))
        inverse = [order.index(axis) for axis in range(4)]
        o = o.transpose(1, 2).permute(order).contiguous().permute(inverse)
        return o, lse.transpose(1, 2).contiguous().unsqueeze(-1)

    def _scaled_dot_product_cudnn_attention_backward(self, do, q, k, v, o, lse, *others, scale):
        assert all(x.data_ptr() % 16 == 0 and x.stride(-1) == 1 for x in (q, k, v, do))
        assert lse.is_contiguous()
        self.given = {"q": q, "do": do}
        causal = others[-1]
        dense = all(x.transpose(1, 2).is_contiguous() for x in (q, k, v, o))
        key = *(x.shape for x in (q, k, v)), *(x.stride() for x in (q, k, v)), causal
        strides_o, strides_do = self.graphs.setdefault(key, (o.stride(), o.stride() if dense else do.stride()))
        # elements outside a tensor's memory are elements of another one: here zeros
        o, do = _read(o, strides_o), _read(do, strides_do)
        q, k, v, o, do = (x.transpose(1, 2) for x in (q, k, v, o, do))
        grads = attention_reference_backward(
            q, k, v, o, do, None, causal=causal, scale=scale, window=None, sinks=0, cu_seqlens=None
        )
        return [x.transpose(1, 2) for x in grads]


def _read(x: Tensor, strides: tuple) -> Tensor:
    last = sum((n - 1) * stride for n, stride in zip(x.shape, strides, strict=True))
    memory = x.as_strided((x.untyped_storage().nbytes() // x.itemsize - x.storage_offset(),), (1,))
    memory = torch.cat([memory, memory.new_zeros(max(0, last + 1 - len(memory)))])
    return memory.as_strided(x.shape, strides)


@pytest.fixture
def cudnn(monkeypatch) -> Cudnn:
    emulator = Cudnn()
    monkeypatch.setattr(sdpa, "_aten", types.SimpleNamespace(**{n: getattr(emulator, n) for n in dir(emulator)}))
    return emulator


# functions that lay out tensors `[B, T, H, K]` in memory, by name
LAYOUTS = {
    "contiguous": lambda x: x.contiguous(),
    "heads before time": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "time before rows": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "a part of each row": lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]],
    "some of the tokens": lambda x: torch.cat([x, x], 1)[:, : x.shape[1]],
    "another stride of one row": lambda x: x.contiguous().as_strided(x.shape, (8, *x.contiguous().stride()[1:])),
}


def inputs(B=2, T=12, HQ=4, H=2, K=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(B, T, heads, K, generator=generator) for heads in (HQ, H, H, HQ)]


def gradients(*tensors):
    q, k, v, do = (readable(x) for x in tensors)
    o, lse = (x.contiguous() for x in sdpa.cudnn_forward(q, k, v, True, 0.3))
    return sdpa.cudnn_backward(q, k, v, o, lse, do, True, 0.3)


def assert_right(found, q, k, v, do):
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    exact = torch.autograd.grad(attention_reference(*leaves, scale=0.3).o, leaves, do.double())
    for name, got, wanted in zip("qkv", found, exact, strict=True):
        assert relative_error(got, wanted) < 1e-5, name


def layouts(B: int) -> list[str]:
    return [name for name in LAYOUTS if B == 1 or name != "another stride of one row"]


@pytest.mark.parametrize("B", [1, 2])
@pytest.mark.parametrize("lies", ["contiguous", "heads before time", "a part of each row"])
def test_gradients_are_right_for_every_order_of_calls(cudnn, lies, B):
    q, k, v, do = inputs(B)
    q = LAYOUTS[lies](q)
    for first in layouts(B):
        cudnn.graphs.clear()
        for then in (first, *layouts(B)):
            assert_right(gradients(q, k, v, LAYOUTS[then](do)), q, k, v, do)


@pytest.mark.parametrize("lies", LAYOUTS)
def test_graphs_of_torchs_own_attention_are_not_taken_for_others(cudnn, lies):
    q, k, v, do = (LAYOUTS[lies](x) for x in inputs(B=1 if "one row" in lies else 2))
    # torch differentiates its own function like this: all tensors have the memory order of q
    q_t, k_t, v_t, do_t = (x.transpose(1, 2) for x in (q, k, v, do))
    o, lse = cudnn._scaled_dot_product_cudnn_attention(q_t, k_t, v_t, None, True, 0.0, True, scale=0.3)
    none = [None] * 7
    do_t = torch.empty_strided(o.shape, o.stride()).copy_(do_t)
    cudnn._scaled_dot_product_cudnn_attention_backward(do_t, q_t, k_t, v_t, o, lse, *none, 0.0, True, scale=0.3)
    assert_right(gradients(q, k, v, do), q, k, v, do)


@pytest.mark.parametrize("lies", LAYOUTS)
def test_gradients_are_copied_only_if_their_strides_differ(cudnn, lies):
    q, k, v, do = inputs(B=1 if "one row" in lies else 2)
    do = LAYOUTS[lies](do)
    gradients(q, k, v, do)
    assert (cudnn.given["do"].data_ptr() == do.data_ptr()) == (lies in ("contiguous", "another stride of one row"))
    assert cudnn.given["q"].data_ptr() == q.data_ptr()
