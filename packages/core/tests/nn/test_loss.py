"""Test that the blockwise loss has the value and gradients of plain cross-entropy."""

import itertools
import sys

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from tokenmix_core.nn.loss import _blockwise, linear_cross_entropy, token_losses
from tokenmix_core.testing.closeness import assert_within, relative_error

TOKENS, WIDTH, VOCAB = 37, 16, 211


@pytest.fixture
def data():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, dtype=torch.float64, generator=generator)
    weight = torch.randn(VOCAB, WIDTH, dtype=torch.float64, generator=generator)
    labels = torch.randint(0, VOCAB, (TOKENS,), generator=generator)
    labels[::5] = -100
    return hidden, weight, labels


def plain(hidden, weight, labels):
    return F.cross_entropy((hidden @ weight.T).float() if hidden.dtype != torch.float64 else hidden @ weight.T,
                           labels, ignore_index=-100, reduction="sum")  # fmt: skip


def value_and_gradients(loss, hidden, weight, labels, **options):
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    value = loss(hidden, weight, labels, **options)
    return [value.detach(), *torch.autograd.grad(3 * value, (hidden, weight))]


@pytest.mark.parametrize("block_size", [1, 8, TOKENS, 1000])
def test_value_and_gradients_are_exact(data, block_size):
    got = value_and_gradients(linear_cross_entropy, *data, block_size=block_size)
    for x, exact in zip(got, value_and_gradients(plain, *data), strict=True):
        assert relative_error(x, exact) < 1e-13


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_16_bit_errors_do_not_exceed_plain_cross_entropy(data, dtype, impl, device):
    data = tuple(x.to(device) for x in data)
    hidden, weight, labels = data[0].to(dtype), data[1].to(dtype), data[2]
    exact = value_and_gradients(plain, hidden.double(), weight.double(), labels)
    got = value_and_gradients(linear_cross_entropy, hidden, weight, labels, block_size=8, impl=impl)
    baseline = value_and_gradients(plain, hidden, weight, labels)
    for name, *values in zip(("loss", "d_hidden", "d_weight"), got, exact, baseline, strict=True):
        assert_within(name, *values)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
def test_kernel_supports_large_logits_and_several_vocabulary_tiles(scale, device):
    generator = torch.Generator().manual_seed(1)
    # 4,099 logits are one tile and three elements
    hidden, weight = (torch.randn(n, 8, generator=generator).to(device) for n in (5, 4099))
    labels = torch.tensor([0, 4098, -100, 4095, 7], device=device)
    exact = value_and_gradients(plain, scale * hidden.double(), weight.double(), labels)
    baseline = value_and_gradients(plain, scale * hidden, weight, labels)
    got = value_and_gradients(linear_cross_entropy, scale * hidden, weight, labels, impl="triton")
    for name, *values in zip(("loss", "d_hidden", "d_weight"), got, exact, baseline, strict=True):
        assert_within(name, *values, floor=torch.finfo(torch.float32).eps)
    assert not got[1][2].any()


def test_no_tensor_has_the_size_of_all_logits(data):
    class Largest(TorchDispatchMode):
        size = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for x in out if isinstance(out, tuple | list) else [out]:
                self.size = max(self.size, x.numel() if isinstance(x, torch.Tensor) else 0)
            return out

    with Largest() as largest:
        value_and_gradients(linear_cross_entropy, *data, block_size=4)
    # rows of logits are whole: 256 of them, where there are 211 words
    assert 0 < largest.size <= 256 * WIDTH < TOKENS * VOCAB


def test_frozen_inputs_get_no_gradient(data):
    hidden, weight, labels = data
    for frozen in (0, 1):
        tensors = [hidden.clone(), weight.clone()]
        tensors[1 - frozen].requires_grad_()
        linear_cross_entropy(*tensors, labels).backward()
        assert tensors[frozen].grad is None
        exact = value_and_gradients(plain, *data)[2 - frozen] / 3
        assert relative_error(tensors[1 - frozen].grad, exact) < 1e-13


def test_loss_without_predicted_tokens_is_zero(data):
    value, *gradients = value_and_gradients(linear_cross_entropy, data[0], data[1], torch.full_like(data[2], -100))
    assert value == 0
    assert not any(g.any() for g in gradients)


def test_ignore_index_may_be_any_label(data):
    labels = data[2].masked_fill(data[2] == -100, 3)
    kept = labels != 3
    exact = plain(data[0][kept], data[1], labels[kept])
    assert relative_error(linear_cross_entropy(data[0], data[1], labels, ignore_index=3), exact) < 1e-13


def test_gemms_run_in_autocast_dtype(data):
    hidden, weight, labels = data[0].float(), data[1].float(), data[2]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = value_and_gradients(linear_cross_entropy, hidden, weight, labels, block_size=8)
    narrow = value_and_gradients(linear_cross_entropy, hidden.bfloat16(), weight.bfloat16(), labels, block_size=8)
    assert got[0] == narrow[0]
    assert got[1].dtype == got[2].dtype == torch.float32
    assert relative_error(got[2], narrow[2]) < 2**-8


def test_compiles_into_one_graph(data):
    hidden, weight, labels = data[0].float(), data[1].float(), data[2]
    compiled = torch.compile(linear_cross_entropy, backend="aot_eager", fullgraph=True)
    exact = value_and_gradients(linear_cross_entropy, hidden, weight, labels)
    for x, y in zip(value_and_gradients(compiled, hidden, weight, labels), exact, strict=True):
        torch.testing.assert_close(x, y)


def test_custom_operator_passes_opcheck(data):
    hidden, weight, labels = data[0].float(), data[1].float(), data[2]
    for wanted in itertools.product((True, False), repeat=2):
        given = (hidden, weight, labels, -100, 8, False, *wanted)
        torch.library.opcheck(_blockwise, given, test_utils=("test_schema", "test_faketensor"))


def test_token_losses_equal_cross_entropy(data):
    exact = F.cross_entropy(data[0] @ data[1].T, data[2], ignore_index=-100, reduction="none")
    assert relative_error(token_losses(*data, block_size=8), exact) < 1e-13
    assert token_losses(data[0][:0], data[1], data[2][:0]).shape == (0,)


@pytest.mark.parametrize("impl", ["triton", "torch"])
def test_labels_may_be_strided(data, impl, device):
    hidden, weight, labels = (x.to(device) for x in (data[0].float(), data[1].float(), data[2]))
    got = value_and_gradients(linear_cross_entropy, hidden, weight, labels.repeat_interleave(3)[::3], impl=impl)
    for x, y in zip(got, value_and_gradients(linear_cross_entropy, hidden, weight, labels, impl=impl), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("label", [-1, VOCAB])
def test_label_outside_the_vocabulary_gives_nan(data, label, device):
    hidden, weight, labels = (x.to(device) for x in (data[0].float(), data[1].float(), data[2].clone()))
    labels[3] = label
    assert linear_cross_entropy(hidden, weight, labels, impl="triton").isnan()


def test_second_derivatives_raise(data):
    hidden = data[0].clone().requires_grad_()
    # also where the gradient that arrives is a constant: a penalty on gradients would silently pass for one
    for change in (lambda loss: loss, torch.square):
        with pytest.raises(RuntimeError, match="gradients of gradients"):
            torch.autograd.grad(change(linear_cross_entropy(hidden, *data[1:])), hidden, create_graph=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": torch.zeros(2, 3, 4)}, r"hidden \[tokens, D\]"),
        ({"weight": torch.zeros(VOCAB, 5)}, "fits neither"),
        ({"labels": torch.zeros(3, dtype=torch.int64)}, "fits neither"),
        ({"labels": torch.zeros(TOKENS)}, "must be int64"),
        ({"labels": torch.zeros(TOKENS, dtype=torch.int64, device="meta")}, "labels are on meta, expected cpu"),
        ({"block_size": 0}, "block_size must be at least 1, got 0"),
        ({"impl": "fast"}, "got 'fast'"),
        ({"impl": "liger"}, "needs CUDA tensors"),
        ({"impl": "triton"}, "takes no float64"),
    ],
)
def test_invalid_arguments_raise(data, change, message):
    call = dict(zip(("hidden", "weight", "labels"), data, strict=True)) | change
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(call.pop("hidden"), call.pop("weight"), call.pop("labels"), **call)


@pytest.mark.gpu
def test_liger_loss_is_equal(data):
    hidden, weight, labels = (x.to("cuda") for x in (data[0].float(), data[1].float(), data[2]))
    pytest.importorskip("liger_kernel")
    got = value_and_gradients(linear_cross_entropy, hidden, weight, labels, impl="liger")
    for x, y in zip(got, value_and_gradients(linear_cross_entropy, hidden, weight, labels), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-4)


@pytest.mark.gpu
def test_missing_liger_raises(data, monkeypatch):
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers.functional", None)
    hidden, weight, labels = (x.to("cuda") for x in data)
    with pytest.raises(ValueError, match="extra 'fast'"):
        linear_cross_entropy(hidden, weight, labels, impl="liger")


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_runs_on_the_device_of_its_tensors(data):
    exact = value_and_gradients(plain, *data)
    hidden, weight, labels = (x.to("cuda:1") for x in (data[0].float(), data[1].float(), data[2]))
    for _ in range(2):
        got = value_and_gradients(linear_cross_entropy, hidden, weight, labels)
        for x, y in zip(got, exact, strict=True):
            assert relative_error(x, y) < 1e-5
        # a kernel of the first device would come too late
        torch.cuda._sleep(500_000_000)
