"""Inference equals the full forward pass for any types, lengths and splits; linear chunks are evicted."""

from __future__ import annotations

import random
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from tokenmix_core.kernels.launch import cuda_graphs
from tokenmix_core.modeling import HybridCache, decode_graph
from tokenmix_core.nn.init import init_weights_
from tokenmix_core.nn.state import PagedKVState, Span
from tokenmix_core.ops.types import AttentionOutput
from tokenmix_core.testing.closeness import relative_error
from tokenmix_core.testing.fake_cuda_graph import Watched, capture_work
from tokenmix_core.testing.mixers import run_in_parts
from tokenmix_core.testing.models import left_padded, logits_in_parts
from tokenmix_nats_l import decoding, packed
from tokenmix_nats_l.config import NatsLConfig
from tokenmix_nats_l.mixer import NatsL
from tokenmix_nats_l.model import NatsLForCausalLM

LAYER = partial(NatsL, 16, num_heads=2, head_dim=8, num_softmax_heads=4)


def build(**options) -> NatsLForCausalLM:
    torch.manual_seed(0)
    config = NatsLConfig(
        vocab_size=61,
        hidden_size=32,
        num_hidden_layers=2,
        intermediate_size=32,
        initializer_range=0.2,
        mixer_options={"nats_l": {"num_heads": 2, "head_dim": 8, "num_softmax_heads": 4, "rope": True, **options}},
    )
    return NatsLForCausalLM(config).double().eval()


def random_split(total: int, rng: random.Random) -> list[int]:
    """Return random lengths of calls that sum to `total`: single tokens, a few tokens, or several chunks."""
    split = []
    while total:
        split.append(min(total, rng.choice([1, 1, 2, 7, 63, 64, 65, 130])))
        total -= split[-1]
    return split


def drawn_ids(rng: random.Random, batch: int, tokens: int) -> torch.Tensor:
    return torch.randint(3, 61, (batch, tokens), generator=torch.Generator().manual_seed(rng.randrange(2**31)))


@torch.no_grad()
@pytest.mark.parametrize("chunk", [64, 128])
@pytest.mark.parametrize("types", ["learned", "alternate"])
@pytest.mark.parametrize("seed", range(4))
def test_any_length_and_split_equals_the_full_forward(chunk, types, seed):
    rng, model = random.Random(seed), build(chunk=chunk, types=types)
    tokens = rng.randrange(1, 5 * chunk)
    ids = drawn_ids(rng, 2, tokens)
    whole = model(ids, use_cache=False)
    if tokens > 2 * chunk and types == "learned":
        assert 0 < whole.auxiliary["softmax_share"].mean() < 1
    for _ in range(2):
        split = random_split(tokens, rng)
        assert relative_error(logits_in_parts(model, ids, split), whole.logits) < 1e-11, split


@torch.no_grad()
@pytest.mark.parametrize("chunk", [64, 128])
@pytest.mark.parametrize("seed", range(3))
def test_padded_rows_equal_single_sequences(chunk, seed):
    rng, model = random.Random(seed), build(chunk=chunk)
    tokens = 3 * chunk + rng.randrange(chunk)
    lengths = [tokens, rng.randrange(1, tokens), rng.randrange(1, chunk)]
    ids, mask = drawn_ids(rng, 3, tokens), left_padded(lengths, tokens)
    alone = [model(ids[i : i + 1, -n:], use_cache=False).logits[0] for i, n in enumerate(lengths)]
    # calls: a padded prompt, a few tokens at once, steps that end the rows' chunks at different times
    last = rng.randrange(1, 70)
    for split in ([tokens], [tokens - 75, 5, *[1] * 70], [tokens - last, *[1] * last], random_split(tokens, rng)):
        padded = logits_in_parts(model, ids, split, mask)
        for row, n, exact in zip(padded, lengths, alone, strict=True):
            assert relative_error(row[-n:], exact) < 1e-11, (split, n)


@torch.no_grad()
@pytest.mark.parametrize("options", [{"own_chunk": "linear"}, {"own_chunk": "softmax"}, {"types": "alternate"}])
def test_padded_prompts_of_all_variants_continue_as_single_sequences(options):
    model, lengths = build(**options), [140, 64, 3, 70]
    ids, mask = drawn_ids(random.Random(0), 4, 142), left_padded([n + 2 for n in lengths], 142)
    padded = logits_in_parts(model, ids, [140, 1, 1], mask)
    for row, tokens, n in zip(padded, ids, lengths, strict=True):
        alone = model(tokens[None, -n - 2 :], use_cache=False).logits[0]
        assert relative_error(row[-n - 2 :], alone) < 1e-11


@torch.no_grad()
@pytest.mark.parametrize("options", [{}, {"chunk": 128}, {"types": "alternate"}, {"own_chunk": "linear"}])
@pytest.mark.parametrize("seed", range(3))
def test_sequences_of_different_lengths_continue_in_one_call_of_attention(options, seed, monkeypatch):
    model, rng, calls = build(**options), random.Random(seed), []
    attend = packed.attend
    monkeypatch.setattr(packed, "attend", lambda *x: calls.append(1) or attend(*x))
    monkeypatch.setattr(packed, "_extend_in_groups", None)
    split = [110, 20, 1, *(rng.choice([2, 7, 63, 64, 65, 130, 200]) for _ in range(4))]
    total = sum(split)
    # rows have equal or different lengths, and some may have no token in the first calls
    lengths = [total, total - 64, rng.randrange(1, total - 110), rng.randrange(total - 110, total), total]
    ids, mask = drawn_ids(rng, 5, total), left_padded(lengths, total)
    cache, logits, end = model.make_cache(), [], 0
    for count in split:
        calls.clear()
        start, end = end, end + count
        part = model(ids[:, start:end], attention_mask=mask[:, :end], past_key_values=cache)
        logits.append(part.logits)
        # each layer calls `attend` once, except in the first call (no open chunks) and in steps of one token
        assert count == 1 or not start or len(calls) == model.config.num_hidden_layers
    for row, tokens, n in zip(torch.cat(logits, 1), ids, lengths, strict=True):
        alone = model(tokens[None, -n:], use_cache=False).logits[0]
        assert relative_error(row[-n:], alone) < 1e-11, (split, n)


@torch.no_grad()
@pytest.mark.parametrize("options", [{"own_chunk": "softmax"}, {"decay": False}])
def test_rows_with_equally_filled_chunks_are_processed_together(options, monkeypatch):
    model, rng = build(**options), random.Random(0)
    # the first and last row have equal lengths, the second is one chunk shorter; the third is filled differently
    lengths, groups = [150, 86, 33, 150], []
    uniform = packed.extend_uniform
    monkeypatch.setattr(packed, "extend_uniform", lambda *x: groups.append(len(x[1])) or uniform(*x))
    for split in ([110, 20, 1, 19], [100, *random_split(50, rng)]):
        total = sum(split)
        ids, mask = drawn_ids(rng, 4, total), left_padded(lengths, total)
        groups.clear()
        padded = logits_in_parts(model, ids, split, mask)
        assert max(groups) >= 3
        for row, tokens, n in zip(padded, ids, lengths, strict=True):
            alone = model(tokens[None, -n:], use_cache=False).logits[0]
            assert relative_error(row[-n:], alone) < 1e-11, (split, n)


@torch.no_grad()
def test_multi_turn_generation_continues_from_the_cache():
    model, rng = build(), random.Random(0)
    ids, cache = drawn_ids(rng, 1, 120), None
    for turn in range(3):
        cache = model.make_cache() if cache is None else cache
        with_cache = model.generate(ids, past_key_values=cache, max_new_tokens=25, do_sample=False, pad_token_id=0)
        without = model.generate(ids, use_cache=False, max_new_tokens=25, do_sample=False, pad_token_id=0)
        assert torch.equal(with_cache, without), turn
        ids = torch.cat((with_cache, drawn_ids(rng, 1, 50)), 1)


@torch.no_grad()
def test_beams_across_chunk_ends_equal_those_without_a_cache():
    model, rng = build(), random.Random(0)
    ids, mask = drawn_ids(rng, 2, 70), left_padded([70, 50], 70)
    options = {"num_beams": 2, "max_new_tokens": 66, "do_sample": False, "pad_token_id": 0, "attention_mask": mask}
    outputs = [model.generate(ids, use_cache=use_cache, **options) for use_cache in (True, False)]
    assert torch.equal(*outputs)


@torch.no_grad()
@pytest.mark.parametrize(("chunk", "part_length"), [(64, 64), (128, 128), (64, 1)])
@pytest.mark.parametrize(("types", "kept"), [("linear", [0, 0, 0]), ("softmax", [1, 2, 3]), ("alternate", [0, 1, 1])])
def test_only_softmax_chunks_stay_in_the_cache(chunk, part_length, types, kept):
    layer = LAYER(chunk=chunk, types=types).double()
    x = torch.randn(2, 3 * chunk, 16, dtype=torch.float64)
    # bytes of a chunk in two sequences with four heads
    per_chunk = 2 * 4 * chunk * (4 + 8) * x.element_size()
    cache = HybridCache([layer.make_state()])
    part = cache.layers[0].kept
    for start in range(0, 3 * chunk, part_length):
        cache.begin(2, part_length, x.device)
        layer(x[:, start : start + part_length], state=cache.layers[0])
        cache.end()
        chunks = (start + part_length) // chunk
        if chunks:
            assert part.held(0) == kept[chunks - 1] * per_chunk + part.lengths.nbytes
            # spare: the chunks of one call, a page for each head, and one page of each row for chunks that no head
            # retains
            spare = max(chunks, 1) if part_length > chunk else 2
            assert (
                part.allocated
                <= (kept[chunks - 1] + spare + 0.25) * per_chunk + part.table.nbytes + part.lengths.nbytes
            )
        else:
            assert part.allocated == 0


@torch.no_grad()
def test_heads_retain_different_tokens():
    torch.manual_seed(0)
    layer = LAYER()
    for module in layer.modules():
        init_weights_(module, 0.2)
    layer = layer.double()
    x = torch.randn(1, 40 * 64, 16, dtype=torch.float64)
    _, cache = run_in_parts(layer, x, [40 * 64])
    lengths = layer.held_tokens(cache.layers[0])[0]
    # two softmax heads share the types of one head of the delta rule
    assert lengths[0] == lengths[1] != lengths[2] == lengths[3]
    softmax = layer.types_of(x, None).softmax.sum(1)[0] * 64
    assert lengths[::2].tolist() == softmax.tolist()


@torch.no_grad()
@pytest.mark.parametrize("options", [{}, {"types": "alternate"}, {"own_chunk": "softmax"}])
def test_requested_pages_are_those_in_use(options, monkeypatch):
    # the host reads the counts of pages in every call
    monkeypatch.setattr(decoding, "BLOCK", 0)
    model, ids = build(**options), drawn_ids(random.Random(0), 2, 720)
    whole = model(ids, use_cache=False).logits
    for split in ([700, 20], [70, 260, 1, 63, 326]):
        assert relative_error(logits_in_parts(model, ids, split), whole) < 1e-11, split
    cache = model(ids, use_cache=True).past_key_values
    for layer in cache.layers:
        kept = layer.parts["kept"]
        # spare: a page for each head, and one for chunks that no head retains
        assert kept.keys.shape[1] == int(kept.lengths.sum(1).max()) // 64 + 4 + 1


@torch.no_grad()
def test_prompt_operations_do_not_depend_on_length_and_synchronise_once(monkeypatch):
    layer = LAYER(head_dim=64).eval()
    asked = []
    # replace the two operations that have kernels, and the counts of pages that the host reads from the device
    monkeypatch.setattr(decoding, "kept_attention", lambda q, k, v, *_, **options: AttentionOutput(v, v[..., 0]))
    monkeypatch.setattr(layer, "delta_rule", lambda tokens, *_: (tokens.softmax_v, torch.zeros(1, 2, 64, 128)))
    monkeypatch.setattr(decoding, "Asked", lambda x: asked.append(x) or SimpleNamespace(read=lambda: 64 * 40))

    def operations(T):
        state, seen, x = layer.make_state(), [], torch.randn(1, T, 16)
        state.span = Span(1, T, torch.device("cpu"))
        tokens, _ = layer.project(x, None, None, None, step=False)
        with Watched(lambda func, *_: seen.append(func) if not func.is_view else None):
            packed.extend(layer, x, tokens, state)
        return len(seen)

    assert operations(2 * 64) == operations(32 * 64) <= 35
    assert not asked
    assert operations(33 * 64) == operations(40 * 64) <= 40
    assert [x.numel() for x in asked] == [1, 1, 1, 1]


@torch.no_grad()
def test_captured_steps_follow_assigned_types(monkeypatch):
    monkeypatch.setattr(cuda_graphs, "capture_on", lambda device: capture_work)
    model, ids = build(), drawn_ids(random.Random(0), 1, 60)
    options = {"max_new_tokens": 75, "do_sample": False, "pad_token_id": 0}
    found = []
    for types in ("learned", "softmax", "linear"):
        for mixer in model.model.mixers:
            mixer.types = types
        found.append(model.generate(ids, decoding_graph=False, **options))
        assert torch.equal(model.generate(ids, **options), found[-1]), types
    assert not torch.equal(found[1], found[2])


@torch.no_grad()
@pytest.mark.parametrize("beams", [1, 2])
def test_captured_steps_follow_pages_that_grow(beams, monkeypatch):
    # spare pages for one chunk only: every chunk allocates more pages, and steps are captured again
    monkeypatch.setattr(cuda_graphs, "capture_on", lambda device: capture_work)
    monkeypatch.setattr(decode_graph, "SPARE", 64)
    grown, resize = [], PagedKVState._reallocate
    monkeypatch.setattr(PagedKVState, "_reallocate", lambda *x: grown.append(1) or resize(*x))
    model, ids = build(), drawn_ids(random.Random(0), 2, 60)
    options = {"max_new_tokens": 210, "do_sample": False, "num_beams": beams, "pad_token_id": 0}
    whole = model.generate(ids, decoding_graph=False, **options)
    grown.clear()
    assert torch.equal(model.generate(ids, **options), whole)
    assert len(grown) >= 3


def test_cached_call_has_the_gradients_of_an_uncached_call():
    model, ids = build(), drawn_ids(random.Random(0), 2, 150)
    found = []
    for use_cache in (True, False):
        model.zero_grad()
        logits = model(ids, use_cache=use_cache).logits
        logits.square().sum().backward()
        found.append({name: p.grad.clone() for name, p in model.named_parameters()})
    for name, exact in found[1].items():
        assert exact.any(), name
        assert relative_error(found[0][name], exact) < 1e-9, name


def test_gradients_do_not_cross_calls():
    model, ids, cache = build(), drawn_ids(random.Random(0), 2, 150), None
    cache = model.make_cache()
    for part in ids.split([100, 1, 49], 1):
        model(part, past_key_values=cache).logits.sum().backward()
    for layer in cache.layers:
        for name in ("recurrent", "start", "decay", "inputs", "open_keys", "open_values"):
            assert not layer.parts[name].value.requires_grad, name
        assert not layer.parts["kept"].keys.requires_grad


@torch.no_grad()
def test_a_padded_prompt_allocates_pages_for_its_own_chunks():
    model = build()
    cache, ids, mask = model.make_cache(), drawn_ids(random.Random(0), 3, 140), left_padded([140, 70, 3], 140)
    model(ids, attention_mask=mask, past_key_values=cache)
    # two chunks of four heads, and a page for chunks that no head retains
    assert cache.layers[0].kept.keys.shape[1] == 2 * 4 + 1


@torch.no_grad()
def test_a_padded_prompt_reads_lengths_once_for_all_layers(monkeypatch):
    model, reads = build(), []
    read = Span.__dict__["on_host"].fn

    def on_host(span):
        reads.append(1)
        return read(span)

    monkeypatch.setattr(Span, "on_host", type(Span.__dict__["on_host"])(on_host))
    monkeypatch.setattr(packed, "_extend_in_groups", None)
    assert sum(isinstance(mixer, NatsL) for mixer in model.model.mixers) > 1
    ids, mask = drawn_ids(random.Random(0), 3, 140), left_padded([140, 70, 3], 140)
    model(ids, attention_mask=mask, past_key_values=model.make_cache())
    assert len(reads) == 1
