"""Gated linear attention against its recurrence, and the mixer's contract."""

from itertools import pairwise
from typing import ClassVar

import pytest
import torch

from tokenmix_core.testing.closeness import assert_within, relative_error
from tokenmix_core.testing.mixers import MixerContract
from tokenmix_nha.gla import GatedLinearAttention
from tokenmix_nha.ops import chunk_gla


def inputs(tokens=37, dtype=torch.float64, gate=1.0):
    generator = torch.Generator().manual_seed(tokens)

    def draw(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    q, k, v = draw(2, tokens, 4, 5), draw(2, tokens, 2, 5), draw(2, tokens, 2, 7)
    g = gate * torch.nn.functional.logsigmoid(draw(2, tokens, 2, 5))
    return [x.to(dtype) for x in (q, k, v, g)], draw(2, 2, 5, 7)


def by_the_recurrence(q, k, v, g, state):
    outputs = []
    for t in range(q.shape[1]):
        state = g[:, t].exp().unsqueeze(-1) * state + k[:, t].unsqueeze(-1) * v[:, t].unsqueeze(-2)
        outputs.append(torch.einsum("nhk,nhkv->nhv", q[:, t], state.repeat_interleave(2, 1)) * q.shape[-1] ** -0.5)
    return torch.stack(outputs, 1), state


@pytest.mark.parametrize("gate", [0.1, 1.0, 300.0])
@pytest.mark.parametrize("tokens", [1, 15, 16, 37, 300])
def test_chunks_give_what_the_recurrence_gives_in_value_and_gradient(tokens, gate):
    given, state = inputs(tokens, gate=gate)
    results = []
    for function in (by_the_recurrence, lambda *a: chunk_gla(*a[:4], initial_state=a[4])):
        tensors = [x.clone().requires_grad_() for x in (*given, state)]
        o, final = function(*tensors)
        weight = torch.linspace(-1, 1, o.numel(), dtype=o.dtype).view_as(o)
        ((o * weight).sum() + final.square().sum()).backward()
        results.append([o, final, *(x.grad for x in tensors)])
    for exact, got in zip(*results, strict=True):
        assert relative_error(got, exact) < 1e-10


def test_float32_errs_as_the_recurrence_in_float32_does():
    given, state = inputs()
    exact = by_the_recurrence(*given, state)[0]
    narrow = [x.float() for x in (*given, state)]
    got = chunk_gla(*narrow[:4], initial_state=narrow[4]).o
    assert_within("o", got, exact, by_the_recurrence(*narrow)[0])


def test_packed_sequences_are_taken_apart():
    (q, k, v, g), state = inputs()
    packed = [x[:1] for x in (q, k, v, g)]
    out = chunk_gla(*packed, initial_state=state, cu_seqlens=torch.tensor([0, 20, 37]))
    for n, span in enumerate((slice(0, 20), slice(20, 37))):
        alone = chunk_gla(*(x[:, span] for x in packed), initial_state=state[n : n + 1])
        assert relative_error(out.o[:, span], alone.o) < 1e-12
        assert relative_error(out.final_state[n : n + 1], alone.final_state) < 1e-12


@pytest.mark.parametrize("gate", [0.1, 300.0])
def test_packed_sequences_without_states_equal_the_sequences_in_value_and_gradient(gate):
    """More chunks than are taken one after the other, borders within and at their ends, and empty sequences."""
    borders = [0, 3, 3, 32, 50, 500, 600, 600]
    (q, k, v, g), _ = inputs(600, gate=gate)
    results = []
    for packed in (True, False):
        tensors = [x[:1].clone().requires_grad_() for x in (q, k, v, g)]
        if packed:
            o, states = chunk_gla(*tensors, cu_seqlens=torch.tensor(borders))
        else:
            spans = [slice(a, b) for a, b in pairwise(borders)]
            parts = [chunk_gla(*(x[:, span] for x in tensors)) for span in spans if span.start < span.stop]
            o = torch.cat([part.o for part in parts], 1)
            finals = iter(part.final_state for part in parts)
            states = torch.cat([next(finals) if s.start < s.stop else torch.zeros(1, 2, 5, 7) for s in spans])
        weight = torch.linspace(-1, 1, o.numel(), dtype=o.dtype).view_as(o)
        ((o * weight).sum() + states.square().sum()).backward()
        results.append([o, states, *(x.grad for x in tensors)])
    for got, exact in zip(*results, strict=True):
        assert relative_error(got, exact) < 1e-10


def test_what_does_not_fit_is_refused():
    (q, k, v, g), state = inputs()
    for arguments, options, message in (
        ((q, k, v, g[..., :4]), {}, "g must have shape"),
        ((q[:, :, :3], k, v, g), {}, "HQ must be a multiple"),
        ((q.float(), k, v, g), {}, "share one dtype"),
        ((q, k, v, g), {"initial_state": state[:1]}, "initial_state must have shape"),
        ((q, k, v, g), {"initial_state": state.float()}, "initial_state must be float64"),
        ((q, k, v, g), {"cu_seqlens": torch.tensor([0, 37])}, "a packed batch has B = 1"),
    ):
        with pytest.raises(ValueError, match=message):
            chunk_gla(*arguments, **options)


class TestMixer(MixerContract):
    cases: ClassVar = {
        "gla": lambda: GatedLinearAttention(32, num_heads=2),
        "wide": lambda: GatedLinearAttention(32, num_heads=4, expand_k=1.0, expand_v=2.0, gate_normalizer=1.0),
    }


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="must divide"):
        GatedLinearAttention(32, num_heads=3)
    with pytest.raises(ValueError, match="gate_normalizer"):
        GatedLinearAttention(32, gate_normalizer=0)
