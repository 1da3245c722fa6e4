"""Test decoding with captured steps: when they are captured, kept and dropped, and the generated tokens."""

import copy
import pickle

import pytest
import torch
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

from tokenmix_core.kernels.launch import cuda_graphs
from tokenmix_core.modeling import HybridConfig, HybridForCausalLM, captured_steps, decode_graph, sampling
from tokenmix_core.testing.closeness import relative_error
from tokenmix_core.testing.fake_cuda_graph import HostRead, Watched, capture_work, graphs_everywhere
from tokenmix_core.testing.models import left_padded

FIELDS = {
    "vocab_size": 61,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "mixers": ["gated_delta_net", "attention", "local"],
    "mixer_options": {
        "gated_delta_net": {"num_heads": 2, "head_dim": 8},
        "attention": {"num_heads": 2},
        "local": {"type": "attention", "num_heads": 2, "window": 5, "sinks": 1},
    },
    "initializer_range": 0.3,
    "pad_token_id": 0,
}
OPTIONS = {"do_sample": False, "max_new_tokens": 24}


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return HybridForCausalLM(HybridConfig(**FIELDS)).eval()


@pytest.fixture
def ids():
    return torch.randint(3, 61, (2, 7), generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def free_graphs(model):
    yield
    model.free_decoding_graphs()


@pytest.fixture
def captures(monkeypatch):
    """Return the list of captured functions; decoding captures graphs on this device."""
    counted = []
    monkeypatch.setattr(cuda_graphs, "capture_on", lambda _: lambda work: counted.append(work) or capture_work(work))
    return counted


def test_fake_capture_refuses_synchronisation():
    x = torch.tensor([3, 0, 1])
    for work in (
        lambda: x.sum().item(),
        lambda: x.tolist(),
        lambda: x[x > 0],
        lambda: x.nonzero(),
        lambda: x.add_(torch.tensor([1, 2, 3])),
        lambda: bool(x.any()),
    ):
        with pytest.raises(HostRead), Watched():
            work()
    assert x.tolist() == [3, 0, 1]
    replay = capture_work(lambda: x.add_(x.roll(1) * 2))
    assert x.tolist() == [3, 0, 1]
    replay()
    assert x.tolist() == [5, 6, 1]
    replay()
    assert x.tolist() == [7, 16, 13]


def test_steps_are_captured_once_for_generations_of_equal_batch_size(model, ids, captures):
    plain = model.generate(ids, decoding_graph=False, **OPTIONS)
    for tokens in (7, 5):
        assert torch.equal(model.generate(ids[:, :tokens], **OPTIONS)[:, :tokens], ids[:, :tokens])
        # the two captures are a step and its sampling
        assert len(captures) == 2
    assert torch.equal(model.generate(ids, **OPTIONS), plain)
    assert len(captures) == 2
    # the step is reused, and the other sampling options are captured
    model.generate(ids, do_sample=True, top_k=5, max_new_tokens=5)
    assert len(captures) == 3
    assert len(model.step_store) == 1
    model.generate(ids[:1], **OPTIONS)
    assert len(captures) == 5
    model.free_decoding_graphs()
    assert len(model.step_store) == 0


def test_repeated_batch_sizes_are_captured_once_and_larger_storage_replaces_smaller(model, captures, monkeypatch):
    monkeypatch.setattr(decode_graph, "_SPACIOUS_BYTES", 0)
    sizes, ids = range(1, 8), torch.randint(3, 60, (1, 400))
    options = {**OPTIONS, "max_new_tokens": 5}
    for tokens in (200, 300, 400):
        for batch in sizes:
            model.generate(ids[:, :tokens].expand(batch, -1).contiguous(), **options)
        assert len(model.step_store) == len(sizes)
    made = len(captures)
    for tokens in (390, 250, 17):
        for batch in sizes:
            model.generate(ids[:, :tokens].expand(batch, -1).contiguous(), **options)
    assert len(captures) == made
    assert len(model.step_store) == len(sizes)


def test_lengths_that_vary_are_captured_once_while_storage_is_small(model, captures, monkeypatch):
    monkeypatch.setattr(decode_graph, "_LEAST_CAPACITY", 8)
    options = {**OPTIONS, "max_new_tokens": 5}

    def generate(tokens):
        model.generate(torch.randint(3, 60, (2, tokens)), **options)
        return [steps.capacity for steps in model.step_store._idle], len(captures)

    assert [generate(tokens) for tokens in (7, 300, 1000, 12)] == [([1024], 2)] * 4
    # a longer sequence doubles the capacity, and storage that takes many bytes is as large as necessary
    assert generate(1100) == ([2048], 4)
    monkeypatch.setattr(decode_graph, "_SPACIOUS_BYTES", 2 * 2048 * 128)
    assert generate(2100) == ([2304], 6)


def test_states_of_constant_size_are_captured_once_for_all_lengths(captures):
    options = {name: x for name, x in FIELDS["mixer_options"].items() if name != "attention"}
    fields = {**FIELDS, "mixers": ["gated_delta_net", "local", "local"], "mixer_options": options}
    model = HybridForCausalLM(HybridConfig(**fields)).eval()
    for tokens in (7, 900, 300):
        model.generate(torch.randint(3, 60, (2, tokens)), **OPTIONS)
    # the two captures are the step and the selection of a token
    assert len(captures) == 2
    assert len(model.step_store) == 1


def test_captured_steps_over_the_memory_limit_are_dropped(model, ids, captures, monkeypatch):
    monkeypatch.setattr(captured_steps, "_KEPT_BYTES", 0)
    for batch in range(1, 7):
        model.generate(ids[:1].expand(batch, -1).contiguous(), **OPTIONS)
    assert len(model.step_store) == captured_steps._KEPT


@pytest.mark.parametrize("options", [{"repetition_penalty": 1.3, "do_sample": True}, {"num_beams": 2}])
def test_growing_keys_move_to_larger_storage(model, ids, captures, options, monkeypatch):
    monkeypatch.setattr(decode_graph, "_LEAST_CAPACITY", 8)
    monkeypatch.setattr(decode_graph, "_SPACIOUS_BYTES", 0)
    monkeypatch.setattr(decode_graph, "_rounded_up", lambda tokens: tokens)
    mask = left_padded([7, 4], 7)
    said = []
    for graph in (False, None):
        torch.manual_seed(0)
        said.append(model.generate(ids, attention_mask=mask, decoding_graph=graph, **OPTIONS | options))
    assert torch.equal(*said)
    # capacities were 14, 28 and 31 tokens
    assert len(captures) >= 3


def test_moved_weights_are_captured_again_and_hooks_are_called(model, ids, captures):
    model = copy.deepcopy(model)
    model.generate(ids, **OPTIONS)
    wide = model.double().generate(ids, **OPTIONS)
    assert len(captures) == 4
    assert torch.equal(wide, model.generate(ids, decoding_graph=False, **OPTIONS))
    calls = []
    model.lm_head.register_forward_hook(lambda *_: calls.append(1))
    model.generate(ids, **OPTIONS)
    assert len(calls) == 24
    assert len(captures) == 4


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("full"), RuntimeError("not permitted while capturing")])
def test_failed_capture_warns_once_and_decodes(model, ids, monkeypatch, error):
    plain = model.generate(ids, decoding_graph=False, **OPTIONS)

    def fail(work):
        work()
        raise error

    # the fake capture runs nothing, like a device that has not executed the operations before the failure
    monkeypatch.setattr(cuda_graphs, "capture_on", lambda device: lambda work: (capture_work(work), fail(lambda: None)))
    with pytest.warns(UserWarning, match="kernel by kernel") as caught:
        assert torch.equal(model.generate(ids, decoding_graph=True, **OPTIONS), plain)
    assert len(caught) == 1


def test_prompt_out_of_memory_frees_captured_steps_and_retries(model, ids, captures, monkeypatch):
    plain = model.generate(ids, **OPTIONS)
    forward, full = type(model.model).forward, [True]

    def short_of_memory(*args, **kwargs):
        if full.pop() if full else False:
            raise torch.OutOfMemoryError("full")
        return forward(*args, **kwargs)

    # patch the class: a model with a forward of its own is not captured
    monkeypatch.setattr(type(model.model), "forward", short_of_memory)
    assert len(model.step_store) == 1
    assert torch.equal(model.generate(ids, **OPTIONS), plain)
    assert not full
    full.append(True)
    model.free_decoding_graphs()
    with pytest.raises(torch.OutOfMemoryError):
        model.generate(ids, **OPTIONS)


def test_host_synchronises_every_16_tokens(model, ids, captures, monkeypatch):
    asked, ask = [], sampling.Sampler.ask
    monkeypatch.setattr(sampling.Sampler, "ask", lambda self, *args: asked.append(args) or ask(self, *args))
    model.generate(ids, **OPTIONS)
    assert not asked
    plain = model.generate(ids, decoding_graph=False, eos_token_id=[5, 6], **OPTIONS | {"max_new_tokens": 60})
    assert torch.equal(model.generate(ids, eos_token_id=[5, 6], **OPTIONS | {"max_new_tokens": 60}), plain)
    assert len(asked) == -(-(plain.shape[1] - 7) // 16)


class Streamer:
    def __init__(self):
        self.got, self.ended = [], False

    def put(self, tokens):
        self.got += tokens.flatten().tolist()

    def end(self):
        self.ended = True


@pytest.mark.parametrize("eos", [None, 23, [5, 6, 7, 8, 9]])
def test_streamers_receive_every_token_once(model, ids, captures, eos):
    streamers, said = [Streamer(), Streamer()], []
    for streamer, graph in zip(streamers, (False, None), strict=True):
        options = OPTIONS | {"eos_token_id": eos, "decoding_graph": graph}
        said.append(model.generate(ids[:1], streamer=streamer, **options))
    assert torch.equal(*said)
    assert streamers[0].got == streamers[1].got
    assert streamers[1].ended


class AfterSeven(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        return (input_ids == 7).any(1)


def test_custom_stopping_criterion_runs_after_every_token(model, ids, captures):
    options = OPTIONS | {"stopping_criteria": StoppingCriteriaList([AfterSeven()]), "eos_token_id": 3}
    with pytest.warns(UserWarning, match="AfterSeven needs the host"):
        said = model.generate(ids, **options)
    assert torch.equal(said, model.generate(ids, decoding_graph=False, **options))
    assert len(captures) == 1


def test_switches_disable_capture_and_refuse_invalid_values(model, ids, captures, monkeypatch):
    plain = model.generate(ids, decoding_graph=False, **OPTIONS)
    config = GenerationConfig(decoding_graph=False, pad_token_id=0, **OPTIONS)
    assert torch.equal(model.generate(ids, generation_config=config), plain)
    monkeypatch.setenv("TOKENMIX_DECODING_GRAPH", "0")
    assert torch.equal(model.generate(ids, **OPTIONS), plain)
    assert not captures
    monkeypatch.setenv("TOKENMIX_DECODING_GRAPH", "yes")
    with pytest.raises(ValueError, match=r"must be 0 .* or 1"):
        model.generate(ids, **OPTIONS)
    with pytest.raises(ValueError, match="decoding_graph must be"):
        model.generate(ids, decoding_graph="always", **OPTIONS)
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"decoding_graph=True: .* no graphs on cpu"):
        model.generate(ids, decoding_graph=True, **OPTIONS)


@pytest.mark.parametrize("eos", [None, 23])
def test_user_cache_is_equal_with_and_without_graphs(model, ids, captures, eos):
    said = []
    for graph in (False, None):
        cache = model.make_cache()
        options = OPTIONS | {"eos_token_id": eos, "decoding_graph": graph}
        first = model.generate(ids[:1], past_key_values=cache, return_dict_in_generate=True, **options)
        assert first.past_key_values is cache
        assert not cache.fixed
        # another generation may reuse the memory
        model.generate(ids[1:], **OPTIONS)
        with torch.no_grad():
            said.append((first.sequences, cache.length, model(first.sequences[:, -1:], past_key_values=cache).logits))
    assert torch.equal(said[0][0], said[1][0])
    assert said[0][1] == said[1][1]
    assert relative_error(said[1][2], said[0][2]) < 1e-5


def test_scores_are_returned_by_transformers_loop(model, ids, captures):
    options = OPTIONS | {"max_new_tokens": 6, "return_dict_in_generate": True, "output_scores": True}
    plain, got = (model.generate(ids, decoding_graph=graph, **options) for graph in (False, None))
    assert torch.equal(got.sequences, plain.sequences)
    for a, b in zip(got.scores, plain.scores, strict=True):
        assert relative_error(a, b) < 1e-5
    assert len(captures) == 1


def test_copies_of_models_and_caches_are_independent(model, ids, captures):
    model.generate(ids, **OPTIONS)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert len(other.step_store) == 0
    with torch.no_grad():
        cache = model(ids, use_cache=True).past_key_values
        with model.decoding(cache):
            model(ids[:, :1], past_key_values=cache)
            model(ids[:, :1], past_key_values=cache)
            other = copy.deepcopy(cache)
            a = model(ids[:, 1:2], past_key_values=cache).logits
            # a call of several tokens continues from the same states
            b = model(ids[:, 1:3], past_key_values=other).logits
            assert relative_error(a, b[:, :1]) < 1e-5
            c = model(ids[:, 2:3], past_key_values=cache).logits
            assert relative_error(c, b[:, 1:]) < 1e-5


def test_fix_refuses_empty_caches_and_unfitting_storage(model, ids):
    cache = model.make_cache()
    with pytest.raises(ValueError, match="has seen tokens"):
        cache.fix(64)
    with torch.no_grad():
        model(ids, past_key_values=cache)
        with pytest.raises(ValueError, match="capacity must be above the 7"):
            cache.fix(7)
        storage = cache.fix(12)
        other = model(ids[:1], use_cache=True).past_key_values
    with pytest.raises(ValueError, match="does not fit"):
        other.fix(12, storage)


def test_nested_generation_uses_its_own_storage(model, ids):
    plain = model.generate(ids, decoding_graph=False, **OPTIONS)
    with graphs_everywhere(), torch.no_grad():
        cache = model(ids, use_cache=True).past_key_values
        with model.decoding(cache):
            tokens = plain[:, 7:9]
            for t in range(2):
                logits = model(tokens[:, t : t + 1], past_key_values=cache).logits
            # a nested generation of the same size uses other memory
            assert torch.equal(model.generate(ids, **OPTIONS), plain)
            assert torch.equal(logits[:, -1].argmax(-1), plain[:, 9])
            assert torch.equal(model(plain[:, 9:10], past_key_values=cache).logits[:, -1].argmax(-1), plain[:, 10])


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{"eos_token_id": 5}, {"do_sample": True, "top_k": 9}, {"num_beams": 3}])
def test_graphs_give_the_same_tokens_on_a_gpu(model, ids, options):
    model, ids = copy.deepcopy(model).cuda(), ids.cuda()
    options = OPTIONS | {"max_new_tokens": 64, "attention_mask": left_padded([7, 4], 7).cuda(), **options}
    said = []
    # the last one replays the graphs of the one before
    for graph in (False, True, True):
        torch.manual_seed(0)
        said.append(model.generate(ids, decoding_graph=graph, **options))
    assert torch.equal(said[0], said[1])
    assert torch.equal(said[0], said[2])
    assert len(model.step_store) == 1


@pytest.mark.gpu
def test_replay_waits_for_its_capture(model, ids, monkeypatch):
    """A capture sets the offset of the random generator on its own stream, before which no replay may change it."""

    class Slow(torch.cuda.CUDAGraph):
        def capture_begin(self, *args, **options):
            torch.cuda._sleep(1 << 28)
            super().capture_begin(*args, **options)

    model, ids = copy.deepcopy(model).cuda(), ids.cuda()
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Slow)
    said = []
    for graph in (False, True):
        torch.manual_seed(0)
        said.append(model.generate(ids, decoding_graph=graph, do_sample=True, max_new_tokens=8))
    assert torch.equal(*said)


@pytest.mark.gpu
@torch.no_grad()
def test_replayed_steps_never_synchronise(model, ids):
    model, ids = copy.deepcopy(model).cuda(), ids.cuda()
    whole = model(ids, use_cache=False).logits
    cache = model(ids[:, :2], use_cache=True).past_key_values
    with model.decoding(cache, graph=True):
        for t in range(2, 4):
            model(ids[:, t : t + 1], past_key_values=cache)
        torch.cuda.set_sync_debug_mode("error")
        try:
            logits = [model(ids[:, t : t + 1], past_key_values=cache).logits.clone() for t in range(4, 7)]
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert any(cache.steps.captured.graphs.values())
    assert relative_error(torch.cat(logits, 1), whole[:, 4:]) < 1e-3


def test_disabled_adapter_is_not_in_a_captured_step(model, ids, captures):
    peft = pytest.importorskip("peft")
    model = copy.deepcopy(model)
    exact = model.generate(ids, decoding_graph=False, **OPTIONS)
    config = peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    adapted = peft.get_peft_model(model, config)
    with_adapter = adapted.generate(input_ids=ids, **OPTIONS)
    assert not torch.equal(with_adapter, exact)
    with adapted.disable_adapter():
        assert torch.equal(adapted.generate(input_ids=ids, **OPTIONS), exact)
    assert torch.equal(adapted.generate(input_ids=ids, **OPTIONS), with_adapter)
    assert captures
