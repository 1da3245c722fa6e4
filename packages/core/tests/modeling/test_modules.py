"""Test that replaced forwards, weights and losses of other libraries are used."""

import copy

import pytest
import torch
from torch import nn

from tokenmix_core.modeling import HybridConfig, HybridForCausalLM
from tokenmix_core.nn.loss import linear_cross_entropy
from tokenmix_core.nn.plain import is_plain
from tokenmix_core.testing.closeness import relative_error

FIELDS = {
    "vocab_size": 59,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "mixers": ["gated_delta_net", "mamba2", "attention"],
    "mixer_options": {
        "gated_delta_net": {"num_heads": 1, "head_dim": 16},
        "mamba2": {"head_dim": 16, "state_size": 16},
        "attention": {"num_heads": 2, "qk_norm": True},
    },
    "tie_word_embeddings": False,
}


class Halved(torch.Tensor):
    """A weight stored as twice its value, like quantised ones, which are stored as codes and scales."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        def value(x):
            return x.as_subclass(torch.Tensor) / 2 if isinstance(x, cls) else x

        if func is nn.functional.linear:
            return func(*map(value, args), **{k: value(x) for k, x in (kwargs or {}).items()})
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.fixture
def model():
    torch.manual_seed(0)
    return HybridForCausalLM(HybridConfig(**FIELDS)).eval()


@pytest.fixture
def ids():
    return torch.randint(0, 59, (2, 16), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def results(model, ids):
    """Return the loss, the logits, and the logits of two decoding steps."""
    out, cache = model(ids, labels=ids, use_cache=False), model.make_cache()
    steps = [model(part, past_key_values=cache).logits for part in ids.split([14, 1, 1], 1)]
    return torch.cat([out.loss.view(1), out.logits.flatten(), *(x.flatten() for x in steps)])


def test_offloaded_weights_are_loaded(model, ids):
    accelerate = pytest.importorskip("accelerate")
    exact = results(model, ids)
    offloaded = accelerate.cpu_offload(copy.deepcopy(model), execution_device=torch.device("cpu"))
    assert offloaded.lm_head.weight.is_meta
    # fused and separate modules round differently
    assert relative_error(results(offloaded, ids), exact) < 1e-6


def test_weight_subclasses_are_used(model, ids):
    exact, other = results(model, ids), copy.deepcopy(model)
    for module in other.modules():
        if type(module) is nn.Linear:
            module.weight = nn.Parameter((2 * module.weight.detach()).as_subclass(Halved))
            assert not is_plain(nn.Linear, module)
    assert relative_error(results(other, ids), exact) < 1e-6


def test_custom_loss_function_gets_unshifted_labels(model, ids):
    exact = model(ids, labels=ids).loss
    given = {}

    def own(logits, labels, vocab_size, **options):
        given.update(options, vocab_size=vocab_size)
        return 2 * nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    model.loss_function = own
    torch.testing.assert_close(model(ids, labels=ids).loss, 2 * exact)
    assert given == {"vocab_size": 59}


def test_output_bias_is_in_the_loss(model, ids):
    head = nn.Linear(32, 59)
    head.weight = model.lm_head.weight
    nn.init.normal_(head.bias)
    model.lm_head = head
    out = model(ids, labels=ids)
    wanted = nn.functional.cross_entropy(out.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    torch.testing.assert_close(out.loss, wanted)


def test_meta_weight_raises():
    hidden, labels = torch.randn(3, 8), torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ValueError, match="weight is on meta"):
        linear_cross_entropy(hidden, torch.empty(9, 8, device="meta"), labels)
