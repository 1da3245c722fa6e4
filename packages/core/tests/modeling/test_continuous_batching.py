"""Test requests of transformers' engine: forks, refusals, memory, and which states they share."""

from types import SimpleNamespace

import pytest
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from tokenmix_core.modeling.cache_name import CACHE
from tokenmix_core.modeling.prefixes import Prefixes
from tokenmix_core.modeling.request_states import Chunk, RequestStates
from tokenmix_core.modeling.state_pool import StatePool
from tokenmix_core.nn.state import TensorState
from tokenmix_core.testing.closeness import relative_error
from tokenmix_core.testing.fake_cuda_graph import graphs_everywhere

engine = pytest.mark.skipif(CACHE != "cache", reason="the engine before transformers 5.24 has another interface")


@pytest.fixture
def ids():
    return torch.randint(1, 53, (5, 14), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def test_states_follow_chunks_forks_and_drops(model, ids):
    whole, states = model(ids, use_cache=False).logits, RequestStates(model)

    def run(*chunks):
        tokens = torch.cat([ids[row, past : past + n] for row, past, n in chunks])[None]
        logits = states.run([Chunk(str(row), past, n) for row, past, n in chunks], tokens)
        for (row, past, n), last in zip(chunks, logits, strict=True):
            assert relative_error(last, whole[row, past + n - 1]) < 1e-4

    run((0, 0, 5), (1, 0, 3), (2, 0, 1))
    run((1, 3, 1), (0, 5, 1), (2, 1, 4), (3, 0, 14))
    run((1, 4, 1), (0, 6, 1))
    held = states._rows["1"][0]
    run((1, 5, 1), (0, 7, 1))
    # the same requests decode in the same cache
    assert states._rows["1"][0] is held
    states.fork("0", ["4"])
    ids[4, :8] = ids[0, :8]
    whole = model(ids, use_cache=False).logits
    states.drop("1")
    run((0, 8, 1), (4, 8, 1), (2, 5, 1))
    # a preempted request starts again
    run((2, 0, 6), (0, 9, 1))
    with pytest.raises(ValueError, match="request 0 has 10 tokens, got 3"):
        states.run([Chunk("0", 3, 1)], ids[:1, :1])
    states.clear()
    assert not len(states)
    assert not states.allocated_nbytes


def _run(states, ids, *chunks):
    """Run chunks `(row, past, tokens)` of requests that are named after their rows; return the logits."""
    tokens = torch.cat([ids[row, past : past + n] for row, past, n in chunks])[None]
    return states.run([Chunk(str(row), past, n) for row, past, n in chunks], tokens)


def _contents(states, request):
    cache, row = states._rows[request]
    parts = [part for layer in cache.layers for part in layer.parts.values()]
    return [x[row if part.slots is None else int(part.slots[row])] for part in parts for x in part.tensors]


@torch.no_grad()
def test_requests_join_and_leave_the_pool_without_copies_of_others(model, ids, monkeypatch):
    whole, states, written = model(ids, use_cache=False).logits, RequestStates(model), []
    write = StatePool._write
    monkeypatch.setattr(StatePool, "_write", lambda pool, rows, *args: written.extend(rows) or write(pool, rows, *args))
    _run(states, ids, *((row, 0, 3) for row in range(4)))
    _run(states, ids, (0, 3, 1), (1, 3, 1), (2, 3, 1))
    pool, addresses = states._pool, [x.data_ptr() for x in _contents(states, "1")]
    assert written == [0, 1, 2]
    # request 3 joins, and requests 0 and 3 leave
    _run(states, ids, (3, 3, 1), *((row, 4, 1) for row in (2, 0, 1)))
    states.drop("0")
    states.drop("3")
    logits = _run(states, ids, (2, 5, 1), (1, 5, 1))
    assert relative_error(logits, whole[[2, 1], 5]) < 1e-4
    # request 2 has moved to row 0, and a step computes 2 rows
    assert written[3:] == [3, 0]
    assert {x: states._rows[x] for x in "12"} == {"1": (pool.cache, 1), "2": (pool.cache, 0)}
    assert [x.data_ptr() for x in _contents(states, "1")] == addresses
    assert pool.batch == 2
    assert states.allocated_nbytes == pool.allocated_nbytes
    _run(states, ids, (1, 6, 1), (2, 6, 1))
    assert written[5:] == []


@torch.no_grad()
def test_all_calls_overwrite_recurrent_states_in_slots_without_copies(model, ids, monkeypatch):
    whole, states, copied = model(ids, use_cache=False).logits, RequestStates(model), []
    write = TensorState.write_rows
    monkeypatch.setattr(TensorState, "write_rows", lambda *given: copied.append(given) or write(*given))
    # prompts in chunks, alone and together with others, while other requests decode
    _run(states, ids, (0, 0, 5), (1, 0, 2))
    slots = states._pool.slots.assign(["0", "1"])
    _run(states, ids, (0, 5, 3), (2, 0, 1))
    _run(states, ids, (1, 2, 4), (2, 1, 4), (0, 8, 1))
    _run(states, ids, (3, 0, 6), (0, 9, 1), (1, 6, 1))
    _run(states, ids, (2, 5, 1), (3, 6, 1))
    logits = _run(states, ids, (0, 10, 1), (1, 7, 1), (2, 6, 1), (3, 7, 1))
    assert relative_error(logits, whole[range(4), [10, 7, 6, 7]]) < 1e-4
    assert copied == []
    assert states._pool.slots.assign(["0", "1"]) == slots
    # a copy of a request is copied to a slot of its own
    states.fork("0", ["4"])
    assert copied
    logits = states.run([Chunk("4", 11, 1), Chunk("0", 11, 1)], ids[0, [11, 11]][None])
    assert relative_error(logits, whole[[0, 0], 11]) < 1e-4
    states.drop("4")
    assert sorted(states._pool.slots.owned) == ["0", "1", "2", "3"]


@torch.no_grad()
def test_requests_that_pause_or_outgrow_the_pool_keep_their_states(model, ids, monkeypatch):
    monkeypatch.setattr("tokenmix_core.modeling.decode_graph._USUAL_CAPACITY", 0)
    long = ids.repeat(1, 40)
    whole, states = model(long, use_cache=False).logits, RequestStates(model)
    _run(states, long, (0, 0, 250), (1, 0, 2))
    for i in range(4):
        logits = _run(states, long, (0, 250 + i, 1), (1, 2 + i, 1))
    assert relative_error(logits, whole[[0, 1], [253, 5]]) < 1e-4
    # request 0 pauses, while padding overwrites its row
    for i in range(3):
        logits = _run(states, long, (1, 6 + i, 1), *((row, i, 1) for row in (2, 3)))
    assert relative_error(logits, whole[[1, 2, 3], [8, 2, 2]]) < 1e-4
    assert states._rows["0"][0] is not states._pool.cache
    first = states._pool.cache.capacity
    assert first < 540
    for i in range(254, 540, 11):
        logits = _run(states, long, (0, i, 11))
        _run(states, long, (1, 9 + (i - 254) // 11, 1))
    logits = _run(states, long, (1, 35, 1), (0, 540, 1))
    assert relative_error(logits, whole[[1, 0], [35, 540]]) < 1e-4
    assert states._pool.cache.capacity > 541 > first


@torch.no_grad()
def test_rows_are_as_long_as_requests_are_expected_to_be(model, ids, monkeypatch):
    monkeypatch.setattr("tokenmix_core.modeling.decode_graph._USUAL_CAPACITY", 0)
    states, row = RequestStates(model), ids[:1].repeat(1, 30)
    for end, capacity in ((0, 512), (300, 384), (4000, 512)):
        states.clear()
        model.free_decoding_graphs()
        states.run([Chunk("0", 0, 250, end=end)], row[:, :250])
        states.run([Chunk("0", 250, 1, end=end)], row[:, 250:251])
        assert states._pool.cache.capacity == capacity


@torch.no_grad()
def test_the_next_engine_uses_the_pool_and_its_graphs(model, ids, monkeypatch):
    def serve(rows):
        states = RequestStates(model)
        _run(states, ids, *((row, 0, 3) for row in rows))
        for i in range(3):
            _run(states, ids, *((row, 3 + i, 1) for row in rows))
        states.clear()
        assert not states.allocated_nbytes

    with graphs_everywhere() as captures:
        serve(range(3))
        pool = model.step_store.pool
        assert len(captures) == 1
        serve(range(1, 5))
        assert model.step_store.pool is pool
        assert len(captures) == 1
        # a smaller batch size has its own graph, on the same memory
        held = pool.cache.allocated_nbytes
        serve(range(2))
        assert len(captures) == 2
        assert pool.cache.allocated_nbytes == held
        monkeypatch.setattr(model.model.mixers[1], "impl", "reference")
        serve(range(2))
        assert model.step_store.pool is not pool
    assert model.step_store.free()
    assert not model.step_store.free()
    assert model.step_store.pool is None


@engine
def test_several_sequences_for_one_prompt(model, ids):
    config = GenerationConfig(max_new_tokens=5, do_sample=True, num_return_sequences=3, pad_token_id=0)
    pool = ContinuousBatchingConfig(page_size=8, num_blocks=32, max_batch_tokens=32, seed=0)
    # nothing of a prompt of one token is left to compute before the fork
    results = model.generate_batch([*ids[:2].tolist(), [5]], config, pool)
    assert len(results) == 9
    assert all(len(x.generated_tokens) == 5 and x.error is None for x in results.values())


@engine
def test_requests_that_cannot_run_are_refused(model, ids, monkeypatch):
    config = GenerationConfig(max_new_tokens=5, do_sample=False, pad_token_id=0)
    pool = ContinuousBatchingConfig(page_size=8, num_blocks=2, max_batch_tokens=32)
    with model.continuous_batching_context_manager(config, continuous_batching_config=pool) as manager:
        with pytest.raises(ValueError, match=r"14 tokens and 5 new ones exceeds the pool's 16 tokens: set num_blocks"):
            manager.add_request(ids[0].tolist())
        with pytest.raises(ValueError, match="at least one token"):
            manager.add_request([])
    with pytest.raises(RuntimeError, match="1 of 1 requests did not run"):
        model.generate_batch([ids[0].tolist()], config, pool)
    with pytest.raises(ValueError, match="cpu_offload_space is not available"):
        model.init_continuous_batching(config, ContinuousBatchingConfig(cpu_offload_space=1.0))
    monkeypatch.setattr("tokenmix_core.modeling.continuous_batching.CACHE", "past_key_values")
    with pytest.raises(ValueError, match=r"transformers 5\.24 or newer"):
        model.init_continuous_batching(config)


@engine
def test_a_kept_manager_serves_the_next_call(model, ids):
    config = GenerationConfig(max_new_tokens=3, do_sample=False, pad_token_id=0)
    first = model.generate_batch(ids[:2].tolist(), config, persistent_manager=True)
    manager = model._cached_continuous_batching_manager
    again = model.generate_batch(ids[:2].tolist(), config, persistent_manager=True)
    assert model._cached_continuous_batching_manager is manager
    assert [x.generated_tokens for x in again.values()] == [x.generated_tokens for x in first.values()]
    model.destroy_cached_continuous_batching_manager()
    assert not hasattr(model, "_cached_continuous_batching_manager")


@engine
def test_options_without_effect_are_named(model):
    config = GenerationConfig(max_new_tokens=3, pad_token_id=0)
    pool = ContinuousBatchingConfig(use_cuda_graph=False, allow_block_sharing=False)
    with pytest.warns(UserWarning, match="sets allow_block_sharing, use_cuda_graph without effect"):
        model.init_continuous_batching(config, pool)


@engine
def test_pool_is_sized_by_free_memory(model):
    manager = model.init_continuous_batching(GenerationConfig(max_new_tokens=5, pad_token_id=0))
    assert manager.max_tokens > 10_000


def _serve(model, prompts, pool, budget, **options):
    """Return the tokens of prompts that run one after another, and the engine's snapshots."""
    config = GenerationConfig(max_new_tokens=6, do_sample=False, pad_token_id=0)
    with model.continuous_batching_context_manager(config, continuous_batching_config=pool) as manager:
        manager.keep_prefixes(budget)
        found = []
        for prompt in prompts:
            manager.add_request(prompt, **options)
            while (result := manager.get_result(timeout=60)) is not None and not result.is_finished():
                pass
            assert result is not None
            assert result.error is None
            found.append(result.generated_tokens)
        states, cache = manager.model.states, manager.batch_processor.cache
        assert not len(states)
        assert not states.allocated_nbytes
        assert cache.free == cache.pages
    return found, states.prefixes


@engine
@torch.no_grad()
def test_prompts_continue_from_snapshots_of_others(model, ids):
    pool = ContinuousBatchingConfig(page_size=4, num_blocks=32, max_batch_tokens=6)
    system, rows = ids[0, :9].tolist(), ids.tolist()
    # the same prompt again; then two tokens of the system's third block differ
    prompts = [system + rows[1], system + rows[1], system + rows[2], system[:8] + rows[3], rows[4][:3]]
    alone = [
        model.generate(torch.tensor([x]), max_new_tokens=6, do_sample=False, pad_token_id=0)[0, len(x) :].tolist()
        for x in prompts
    ]
    found, prefixes = _serve(model, prompts, pool, 1 << 20)
    assert found == alone
    # the second prompt needs its last 3 of 23 tokens; the third finds where it diverges only afterwards
    assert prefixes.counts == {"prefix_hits": 2, "prefix_tokens": 20 + 8, "prefix_evictions": 0}
    size = prefixes.nbytes // len(prefixes)
    assert _serve(model, prompts, pool, 0)[1].counts["prefix_hits"] == 0
    # memory suffices for two snapshots, so older ones are evicted
    found, prefixes = _serve(model, prompts, pool, 2 * size)
    assert found == alone
    assert prefixes.counts["prefix_evictions"] > 0
    assert prefixes.nbytes <= 2 * size


@torch.no_grad()
def test_snapshots_depend_on_weights_and_settings(model, ids):
    states, tokens = RequestStates(model), ids[0].tolist()
    states.prefixes = Prefixes(4, 1 << 20)

    def saved():
        states.begin_step()
        found = states.begin("a", tokens)
        states.run([Chunk("a", found, len(tokens) - found)], ids[:1, found:])
        states.drop("a")
        return found

    assert [saved(), saved()] == [0, 12]
    # change weights in place, as merging an adapter does
    model.lm_head.weight.mul_(1)
    assert [saved(), saved()] == [0, 12]
    model.model.mixers[1].impl = "reference"
    assert [saved(), saved()] == [0, 12]
    model.model.mixers[1].impl = None
    assert saved() == 12
    with pytest.raises(ValueError, match="at least 0"):
        Prefixes(4, -1)


def test_a_replaced_snapshot_is_counted_once():
    prefixes = Prefixes(2, 100)
    prefixes.find("request", [1, 2, 3], None, lambda start, stop: None)
    for size in (60, 40):
        prefixes.store("request", 2, SimpleNamespace(allocated_nbytes=size))
    assert (prefixes.nbytes, len(prefixes), prefixes.counts["prefix_evictions"]) == (40, 1, 0)
