"""Test the loop of continuous batching: what a step computes, in which order, and with how many operations."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import ContinuousBatchingConfig, GenerationConfig

from tokenmix_core.modeling import batch_processor
from tokenmix_core.modeling.cache_name import CACHE
from tokenmix_core.modeling.request_states import RequestStates
from tokenmix_core.modeling.state_pool import StatePool

pytestmark = pytest.mark.skipif(CACHE != "cache", reason="the engine before transformers 5.24 has another interface")


@pytest.fixture
def start(model):
    """Return a function that makes a manager and its processor, without the thread that runs it."""

    def started(new=6, **options):
        config = GenerationConfig(max_new_tokens=new, do_sample=False, pad_token_id=0, eos_token_id=-1)
        pool = ContinuousBatchingConfig(**{"page_size": 8, "num_blocks": 400, "max_batch_tokens": 400, **options})
        manager = model.init_continuous_batching(config, pool)
        manager.batch_processor = manager._create_batch_processor()
        return manager, manager.batch_processor

    return started


@torch.no_grad()
def _step(processor):
    """Run one step; return the lengths of its chunks by request, or None if there was nothing to compute."""
    if not processor.prepare_next_batch():
        return None
    chunks = {x.chunk.request: x.chunk.tokens for x in processor._batch}
    processor._generation_step(None)
    processor.update_batch()
    return chunks


def _all_steps(processor):
    return [*iter(lambda: _step(processor), None)]


def _prompt(tokens):
    return [1 + i % 50 for i in range(tokens)]


def test_a_step_is_launched_before_the_tokens_of_the_previous_step_are_read(start, monkeypatch):
    events, run, read = [], RequestStates.run, batch_processor.Asked.read_list
    monkeypatch.setattr(RequestStates, "run", lambda *args: events.append("run") or run(*args))
    monkeypatch.setattr(batch_processor.Asked, "read_list", lambda self: events.append("read") or read(self))
    manager, processor = start(new=4)
    manager.add_request(_prompt(3))
    _all_steps(processor)
    assert events == ["run", "run", "read", "run", "read", "run", "read", "read"]
    assert len(manager.get_result(timeout=1).generated_tokens) == 4


def test_operations_of_a_decoding_step_do_not_depend_on_the_number_of_requests(start, monkeypatch):
    class Count(TorchDispatchMode):
        operations = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.operations += 1
            return function(*args, **(kwargs or {}))

    def counted(requests):
        manager, processor = start()
        for i in range(requests):
            manager.add_request(_prompt(1 + i % 5))
        for _ in range(3):
            _step(processor)
        with Count() as count:
            assert len(_step(processor)) == requests
        _all_steps(processor)
        return count.operations

    def step(pool, ids, inputs):
        pool._lengths[: pool.batch] = [n + 1 for n in pool._lengths[: pool.batch]]
        pool.cache._fixed_lengths.add_(1)
        return torch.zeros(len(ids), 53)

    # the operations of the model's own step are those of a graph
    monkeypatch.setattr(StatePool, "step", step)
    few = counted(2)
    assert counted(32) == few <= 8


def test_states_of_requests_that_end_are_not_copied(start, monkeypatch):
    copied = []
    monkeypatch.setattr(RequestStates, "_gathered", lambda self, names: copied.append(names))
    manager, processor = start()
    for limit in (2, 3, 5):
        manager.add_request(_prompt(4), max_new_tokens=limit)
    assert [len(x) for x in _all_steps(processor)] == [3, 3, 2, 1, 1]
    assert copied == []
    assert not len(processor.states)


def test_prompts_are_split_only_if_they_exceed_a_step(start):
    manager, processor = start(max_batch_tokens=20, new=1)
    for i, tokens in enumerate((12, 15, 6, 50, 3)):
        manager.add_request(_prompt(tokens), request_id=str(i))
    # request 2 overtakes request 1, and request 3 fills whole steps
    assert _all_steps(processor) == [{"0": 12, "2": 6}, {"1": 15, "4": 3}, {"3": 20}, {"3": 20}, {"3": 10}]


def test_a_prompt_begins_when_memory_for_all_its_tokens_is_free(start):
    manager, processor = start(num_blocks=4, new=3, safety_margin=0.0)
    for i, tokens in enumerate((14, 20)):
        manager.add_request(_prompt(tokens), request_id=str(i))
    steps = _all_steps(processor)
    assert [*steps[0]] == ["0"]
    assert steps[-3:] == [{"1": 20}, {"1": 1}, {"1": 1}]
    assert processor.cache.free == 4


def test_the_newest_request_is_computed_again_if_memory_runs_out(start, model):
    prompts = [_prompt(7), _prompt(6)]
    manager, processor = start(num_blocks=3, new=10, safety_margin=0.0)
    for i, prompt in enumerate(prompts):
        manager.add_request(prompt, request_id=str(i))
    steps = _all_steps(processor)
    # each request needs 2 pages of 3; request 1 has 9 tokens when it starts again
    assert any(x.get("1", 0) > 6 for x in steps)
    results = {x.request_id: x for x in (manager.get_result(timeout=1) for _ in prompts)}
    for i, prompt in enumerate(prompts):
        alone = model.generate(torch.tensor([prompt]), max_new_tokens=10, do_sample=False, pad_token_id=0)
        assert results[str(i)].generated_tokens == alone[0, len(prompt) :].tolist()
        assert results[str(i)].prompt_ids == prompt


def test_further_answers_to_a_prompt_wait_for_memory(start):
    manager, processor = start(num_blocks=4, new=3, safety_margin=0.0)
    manager.num_return_sequences = 3
    manager.add_request(_prompt(9), request_id="a")
    _all_steps(processor)
    results = [manager.get_result(timeout=1) for _ in range(3)]
    assert {x.request_id for x in results} == {"a", "a__child#0", "a__child#1"}
    assert len({tuple(x.generated_tokens) for x in results}) == 1
    assert processor.cache.free == 4


def test_requests_of_a_second_engine_with_the_same_ids_have_their_own_states(start, model):
    for first in (3, 20):
        prompt = _prompt(30)[first : first + 5]
        manager, processor = start()
        manager.add_request(prompt, request_id="a")
        _all_steps(processor)
        alone = model.generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False, pad_token_id=0)
        assert manager.get_result(timeout=1).generated_tokens == alone[0, 5:].tolist()


def test_log_probabilities_are_those_of_the_chosen_tokens(start, model):
    manager, processor = start(new=3, return_logprobs=True)
    manager.add_request(_prompt(5))
    _all_steps(processor)
    result = manager.get_result(timeout=1)
    with torch.no_grad():
        logits = model(torch.tensor([_prompt(5) + result.generated_tokens])).logits[0, 4:-1]
    chosen = logits.log_softmax(-1).gather(1, torch.tensor(result.generated_tokens).unsqueeze(1)).squeeze(1)
    assert torch.allclose(torch.tensor(result.logprobs), chosen, atol=1e-4)


def test_the_penalty_of_a_processor_sees_each_requests_last_token(start, model):
    seen = []

    def processor_list(config):
        from transformers import LogitsProcessorList

        def keep(ids, scores):
            seen.append(ids.tolist())
            return scores

        return LogitsProcessorList([keep])

    model._get_logits_processor = processor_list
    try:
        manager, processor = start(new=2)
    finally:
        del model._get_logits_processor
    manager.add_request([7, 8, 9])
    manager.add_request([4, 5])
    _all_steps(processor)
    assert seen[0] == [9, 5]
    assert len(seen[1]) == 2


def test_an_error_ends_all_requests(start):
    manager, processor = start()
    manager.add_request(_prompt(4))
    _step(processor)
    manager.add_request(_prompt(5))
    processor._update_tp_group_state()
    processor.fail_all_requests(RuntimeError("broken"))
    assert {manager.get_result(timeout=1).error for _ in range(2)} == {"broken"}
    assert _step(processor) is None
    assert processor.cache.free == processor.cache.pages
    assert not len(processor.states)
