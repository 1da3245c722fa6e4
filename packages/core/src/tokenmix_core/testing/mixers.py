"""Tests for every token mixer; test classes inherit them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from tokenmix_core.chunking import packed_positions
from tokenmix_core.modeling import HybridCache, Mixer
from tokenmix_core.nn.init import init_weights_
from tokenmix_core.nn.rotary import RotaryEmbedding
from tokenmix_core.testing.closeness import relative_error
from tokenmix_core.testing.fake_cuda_graph import capture_work


def run_mixer(mixer: Mixer, x: Tensor, *, cu_seqlens: Tensor | None = None, **inputs) -> Tensor:
    """Return a mixer's outputs for whole sequences, computed without a cache."""
    positions = torch.arange(x.shape[1]) if cu_seqlens is None else packed_positions(cu_seqlens, x.shape[1])
    return mixer(x, cu_seqlens=cu_seqlens, rotary=_rotary(mixer, positions), **inputs)[0]


def run_in_parts(mixer: Mixer, x: Tensor, parts: list[int], **inputs) -> tuple[Tensor, HybridCache]:
    """Return a mixer's outputs for sequences passed in parts of the given lengths, and the cache after them."""
    cache, outputs, start = HybridCache([mixer.make_state()]), [], 0
    for part in x.split(parts, 1):
        cache.begin(x.shape[0], part.shape[1], x.device)
        rotary = _rotary(mixer, torch.arange(start, start + part.shape[1]))
        outputs.append(mixer(part, state=cache.layers[0], rotary=rotary, **inputs)[0])
        cache.end()
        start += part.shape[1]
    return torch.cat(outputs, 1), cache


def run_captured(mixer: Mixer, x: Tensor, prompt: int, **inputs) -> tuple[Tensor, HybridCache]:
    """Run the prompt, then capture and replay decoding steps on a fixed cache; return the same as `run_in_parts`."""
    cache, table, B = HybridCache([mixer.make_state()]), _table(mixer), len(x)
    cache.begin(B, prompt, x.device)
    outputs = [mixer(x[:, :prompt], state=cache.layers[0], rotary=_rotary(mixer, torch.arange(prompt)), **inputs)[0]]
    cache.end()
    mixer.prepare_steps(cache.layers[0])
    cache.fix(x.shape[1])
    before = addresses(cache)
    token, o = torch.empty_like(x[:, :1]), torch.empty_like(outputs[0][:, :1])

    def step() -> None:
        span = cache.begin(B, 1, x.device)
        rotary = None if table is None else table(span.positions.view(B, 1))
        o.copy_(mixer(token, state=cache.layers[0], rotary=rotary, **inputs)[0])
        cache.end()

    repeats = {}
    for t in range(prompt, x.shape[1]):
        token.copy_(x[:, t : t + 1])
        form = mixer.step_form(cache.next_step())
        if form not in repeats:
            with cache.capturing():
                repeats[form] = capture_work(step)
        repeats[form]()
        cache.count(1)
        outputs.append(o.clone())
    assert addresses(cache) == before
    return torch.cat(outputs, 1), cache


def addresses(cache: HybridCache) -> list[int]:
    """Return the memory addresses of a cache's tensors."""
    return [x.data_ptr() for layer in cache.layers for part in layer.parts.values() for x in part.tensors]


def random_parts(total: int, rng: random.Random) -> list[int]:
    """Return a random list of parts of 1 to 13 tokens, `total` tokens in all."""
    parts = []
    while total:
        parts.append(min(total, rng.choice([1, 1, 1, 2, 3, 5, 8, 13])))
        total -= parts[-1]
    return parts


class MixerContract:
    """Tests of a token mixer. A subclass `TestX(MixerContract)` sets `cases`.

    Attributes:
        cases: functions, by name, each of which returns a mixer of width `width`.
        width: D, the size of a token's vector.
        tokens: length of the test sequences; exceeds all windows in the cases.
        inputs: further inputs that every call passes to the mixer.
    """

    cases: ClassVar[dict[str, Callable[[], Mixer]]] = {}
    width: ClassVar[int] = 32
    tokens: ClassVar[int] = 21
    inputs: ClassVar[dict] = {}

    def pytest_generate_tests(self, metafunc):
        if "case" in metafunc.fixturenames:
            metafunc.parametrize("case", sorted(self.cases), scope="class")

    @pytest.fixture
    def mixer(self, case) -> Mixer:
        torch.manual_seed(0)
        mixer = self.cases[case]()
        for module in mixer.modules():
            init_weights_(module, 0.2)
        return mixer.double().eval()

    @pytest.fixture
    def x(self) -> Tensor:
        return torch.randn(3, self.tokens, self.width, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def trained(self, x: Tensor) -> dict:
        """Return the further inputs of a call in training with the tokens x."""
        return self.inputs

    @torch.no_grad()
    def test_any_split_gives_what_the_whole_gives(self, mixer, x):
        whole, rng = run_mixer(mixer, x, **self.inputs), random.Random(0)
        splits = [[self.tokens], [1] * self.tokens, *(random_parts(self.tokens, rng) for _ in range(4))]
        for parts in splits:
            assert relative_error(run_in_parts(mixer, x, parts, **self.inputs)[0], whole) < 1e-11, parts

    @torch.no_grad()
    def test_a_captured_step_gives_what_the_whole_gives(self, mixer, x):
        whole = run_mixer(mixer, x, **self.inputs)
        assert relative_error(run_captured(mixer, x, self.tokens // 3, **self.inputs)[0], whole) < 1e-11

    @torch.no_grad()
    def test_the_past_does_not_depend_on_the_future(self, mixer, x):
        cut, other = self.tokens // 2, x.clone()
        other[:, cut:] = torch.randn_like(other[:, cut:])
        before, after = run_mixer(mixer, x, **self.inputs), run_mixer(mixer, other, **self.inputs)
        assert relative_error(after[:, :cut], before[:, :cut]) < 1e-11
        assert not torch.allclose(after[:, cut:], before[:, cut:])

    @torch.no_grad()
    def test_packed_sequences_do_not_see_each_other(self, mixer, x):
        lengths = [1, self.tokens - 9, 0, 8]
        cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        packed = run_mixer(mixer, x[:1], cu_seqlens=cu_seqlens, **self.inputs)
        apart = [run_mixer(mixer, part, **self.inputs) for part in x[:1].split(lengths, 1) if part.shape[1]]
        assert relative_error(packed, torch.cat(apart, 1)) < 1e-11

    def test_padding_behind_packed_sequences_is_zero_and_has_no_gradient(self, mixer, x):
        last = self.tokens - 6
        cu_seqlens = torch.tensor([0, 1, last - 4, last - 4, last], dtype=torch.int32)
        with torch.no_grad():
            wanted = run_mixer(mixer, x[:1, :last], cu_seqlens=cu_seqlens, **self.inputs)
        x = x[:1].clone().requires_grad_()
        packed = run_mixer(mixer, x, cu_seqlens=cu_seqlens, **self.inputs)
        assert relative_error(packed[:, :last], wanted) < 1e-11
        assert not packed[:, last:].any()
        packed.square().sum().backward()
        assert not x.grad[:, last:].any()

    @torch.no_grad()
    def test_sequences_of_a_batch_do_not_see_each_other(self, mixer, x):
        together = run_mixer(mixer, x, **self.inputs)
        assert relative_error(together[1:2], run_mixer(mixer, x[1:2], **self.inputs)) < 1e-11

    @torch.no_grad()
    def test_the_declared_bytes_are_the_bytes_held(self, mixer, x):
        mixer, x = mixer.float(), x.float()
        for length in (1, 2, self.tokens - 1, self.tokens):
            _, cache = run_in_parts(mixer, x[:, :length], [1] * length, **self.inputs)
            least, most = mixer.state_bounds(length, len(x), torch.float32)
            assert least <= cache.nbytes <= most
            assert cache.nbytes <= cache.allocated_nbytes <= 1.5 * mixer.state_bytes(length + 64, len(x), torch.float32)

    @torch.no_grad()
    def test_reordered_sequences_continue_as_themselves(self, mixer, x):
        order, half = torch.tensor([2, 0, 0]), self.tokens // 2
        whole = run_mixer(mixer, x, **self.inputs)[order]
        _, cache = run_in_parts(mixer, x[:, :half], [half], **self.inputs)
        cache.reorder_cache(order)
        outputs = []
        for t in range(half, self.tokens):
            cache.begin(3, 1, x.device)
            rotary = _rotary(mixer, torch.tensor([t]))
            outputs.append(mixer(x[order, t : t + 1], state=cache.layers[0], rotary=rotary, **self.inputs)[0])
            cache.end()
        assert relative_error(torch.cat(outputs, 1), whole[:, half:]) < 1e-11

    def test_gradients_reach_inputs_and_every_parameter(self, mixer, x):
        mixer.train()
        x.requires_grad_()
        run_mixer(mixer, x, **self.trained(x)).square().sum().backward()
        for name, p in [("x", x), *mixer.named_parameters()]:
            assert p.grad is not None, name
            assert p.grad.isfinite().all(), name
            assert p.grad.any(), name

    def test_every_parameter_has_a_gradient_where_a_token_is_all_there_is(self, mixer, x):
        # data-parallel training waits for all gradients: a parameter without effect must have a zero gradient, not
        # None
        token = x[:, :1]
        run_mixer(mixer.train(), token, **self.trained(token)).square().sum().backward()
        assert [name for name, p in mixer.named_parameters() if p.grad is None] == []

    def test_named_tensors_stay_in_float32(self, mixer):
        mixer = mixer.float()
        before = {name: getattr(mixer, name).detach().clone() for name in mixer.float32}
        for narrow in (mixer.to(torch.bfloat16), mixer.half()):
            for name, value in before.items():
                torch.testing.assert_close(getattr(narrow, name).detach(), value, rtol=0, atol=0)
            assert all(p.dtype.itemsize == 2 for name, p in narrow.named_parameters() if name not in before)

    def test_initial_values_do_not_come_from_the_constructor(self, case):
        with torch.device("meta"):
            mixer = self.cases[case]()
        assert all(p.is_meta for p in mixer.parameters())
        mixer.to_empty(device="cpu")
        with torch.no_grad():
            for t in [*mixer.parameters(), *mixer.buffers()]:
                t.fill_(float("nan"))
        for module in mixer.modules():
            init_weights_(module, 0.02)
        for name, t in [*mixer.named_parameters(), *mixer.named_buffers()]:
            assert t.isfinite().all(), name

    def test_an_unknown_option_is_named(self, mixer):
        with pytest.raises(ValueError, match="'no_such_option'"):
            type(mixer).check_options("label", {"no_such_option": 1})

    def test_flops_count_the_projections_and_the_mixing(self, mixer):
        weights = sum(m.weight.numel() for m in mixer.modules() if isinstance(m, torch.nn.Linear))
        for seq_len in (1, self.tokens, 4096):
            assert mixer.mixing_flops(seq_len) > 0
            assert mixer.flops_per_token(seq_len) == 2 * weights + mixer.mixing_flops(seq_len)


def _table(mixer: Mixer) -> RotaryEmbedding | None:
    return None if mixer.rotary_dim is None else RotaryEmbedding(mixer.rotary_dim, {"rope_theta": 10_000.0})


def _rotary(mixer: Mixer, positions: Tensor):
    table = _table(mixer)
    return None if table is None else table(positions.unsqueeze(0))
