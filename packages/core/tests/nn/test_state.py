"""Test KVState and Span against lists of tokens, for any sequence of calls."""

import random

import pytest
import torch

from tokenmix_core.nn.state import KVState, LayerState, Span, TensorState

HEADS, KEY, VALUE, ROWS = 2, 3, 4, 3


def kept_positions(length, window, sinks):
    return [p for p in range(length) if window is None or p < sinks or p >= length - window]


def stored(kv, span):
    """Return, for each row, the stored keys and values of every position."""
    positions = kv.positions(span)
    return [
        {int(p): (kv.keys[row, i], kv.values[row, i]) for i, p in enumerate(positions[row]) if p >= 0}
        for row in range(ROWS)
    ]


@pytest.mark.parametrize(("window", "sinks"), [(None, 0), (4, 0), (4, 2), (1, 0), (1, 3), (6, 6)])
@pytest.mark.parametrize("ragged", [False, True])
def test_kv_state_holds_the_kept_tokens_at_their_positions(window, sinks, ragged):
    for seed in range(6):
        rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        kv = KVState(HEADS, KEY, VALUE, window=window, sinks=sinks)
        rows: list[list] = [[] for _ in range(ROWS)]
        past, lengths = 0, None
        for _ in range(rng.randint(1, 7)):
            tokens = rng.choice([1, 1, 2, 3, 9])
            mask = None
            if ragged and rng.random() < 0.7:
                mask = torch.rand(ROWS, tokens, generator=generator) < 0.6
                mask[0, -1] = True
            span = Span(ROWS, tokens, torch.device("cpu"), past=past, lengths=lengths, mask=mask)
            k = torch.randn(ROWS, tokens, HEADS, KEY, generator=generator)
            v = torch.randn(ROWS, tokens, HEADS, VALUE, generator=generator)
            for row in range(ROWS):
                for t in range(tokens):
                    if mask is None or mask[row, t]:
                        rows[row].append((k[row, t], v[row, t]))
            kv.write(span.pack(k), span.pack(v), span)
            lengths = None if span.uniform else span.after
            past += tokens
            assert kv.filled(span).tolist() == [len(kept_positions(len(r), window, sinks)) for r in rows]
            after = Span(ROWS, 1, torch.device("cpu"), past=past, lengths=lengths)
            for row, held in zip(rows, stored(kv, after), strict=True):
                assert sorted(held) == kept_positions(len(row), window, sinks)
                for p, (key, value) in held.items():
                    assert torch.equal(key, row[p][0])
                    assert torch.equal(value, row[p][1])


@pytest.mark.parametrize(("window", "sinks"), [(None, 0), (4, 0), (4, 2), (1, 0)])
def test_read_returns_the_visible_tokens_in_order(window, sinks):
    for past in range(1, 12):
        kv = KVState(1, 1, 1, window=window, sinks=sinks)
        x = torch.arange(past).float().view(1, past, 1, 1)
        kv.write(x, -x, Span(1, past, torch.device("cpu")))
        keys, values = kv.read(Span(1, 1, torch.device("cpu"), past=past))
        seen = [p for p in range(past) if window is None or p < sinks or p > past - window]
        assert keys.flatten().tolist() == seen
        assert torch.equal(values, -keys)


def test_number_of_slots_grows_by_half():
    for expected in (0, 600):
        kv, sizes = KVState(1, 1, 1), set()
        kv.reserve(expected)
        for t in range(600):
            x = torch.full((1, 1, 1, 1), float(t))
            kv.write(x, x, Span(1, 1, torch.device("cpu"), past=t))
            sizes.add(kv.num_slots)
        assert kv.keys.flatten()[:600].tolist() == list(range(600))
        # each growth adds half of the slots; a known length is not exceeded
        assert len(sizes) <= 8
        assert 600 <= max(sizes) <= (expected or 900 + 64)


def test_unpack_inverts_pack():
    mask = torch.tensor([[0, 1, 1], [1, 0, 0], [0, 0, 0]]).bool()
    span = Span(3, 3, torch.device("cpu"), mask=mask)
    x = torch.randn(3, 3, 2)
    assert span.pack(x).shape == (1, 3, 2)
    assert span.cu_seqlens.tolist() == [0, 2, 3, 3]
    assert torch.equal(span.unpack(span.pack(x)), x * mask.unsqueeze(2))
    assert span.positions.tolist() == [0, 1, 0]
    assert span.rows.tolist() == [0, 0, 1]


def test_states_are_detached():
    state = TensorState(3)
    x = torch.randn(2, 3, requires_grad=True)
    state.set(x * 2)
    assert not state.value.requires_grad
    kv = KVState(1, 1, 1)
    kv.write(x.view(2, 3, 1, 1), x.view(2, 3, 1, 1), Span(2, 3, torch.device("cpu")))
    assert not kv.keys.requires_grad


def test_a_missing_part_raises_attribute_error():
    state = LayerState(conv=TensorState(2))
    assert state.conv is state.parts["conv"]
    with pytest.raises(AttributeError, match="recurrent"):
        _ = state.recurrent


@pytest.mark.parametrize("sinks", [0, 2])
@pytest.mark.parametrize("parts", [[1] * 12, [5, 7], [12], [3, 1, 6, 2]])
def test_leaving_returns_each_token_once_and_in_order(sinks, parts):
    window, past, gone = 4, 0, []
    kv = KVState(1, 1, 1, window=window, sinks=sinks)
    for tokens in parts:
        x = torch.arange(past, past + tokens).float().view(1, tokens, 1, 1)
        span = Span(1, tokens, torch.device("cpu"), past=past)
        keys, values, positions = kv.leaving(x, -x, span)
        assert keys.flatten().tolist() == positions.tolist() == (-values).flatten().tolist()
        gone += positions.tolist()
        kv.write(x, -x, span)
        past += tokens
    assert gone == list(range(sinks, past - window))


def test_fill_is_computed_once_per_call():
    span = Span(3, 1, torch.device("cpu"), past=7, lengths=torch.tensor([0, 3, 7]))
    index, filled = span.fill(4)
    assert index.tolist() == [0, 3, 3]
    assert filled.tolist() == [1, 4, 4]
    assert filled.dtype == torch.int32
    assert span.fill(4)[0] is index
    assert span.fill(8)[0].tolist() == [0, 3, 7]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("own", [None, torch.float32, torch.int32])
def test_bounds_are_the_allocated_bytes(own, dtype):
    state = TensorState(3, 5, dtype=own)
    assert state.get(2, torch.empty(0, dtype=dtype)).nbytes == state.bounds(7, 2, dtype).most
