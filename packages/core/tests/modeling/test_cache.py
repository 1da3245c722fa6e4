"""Test the cache as transformers and users handle it."""

import copy

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tokenmix_core.testing.closeness import relative_error


@pytest.fixture
def ids():
    return torch.randint(1, 53, (3, 14), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def filled(model, ids, mask=None, **options):
    cache = model.make_cache(**options)
    model(ids, attention_mask=mask, past_key_values=cache)
    return cache


@torch.no_grad()
@pytest.mark.parametrize("padded", [False, True])
def test_batches_are_repeated_selected_and_reordered(model, ids, padded):
    mask = torch.ones_like(ids[:, :9])
    if padded:
        mask[1, :5] = 0
    exact = model(ids[1:2, 5:] if padded else ids[1:2], use_cache=False).logits[0, -5:]
    for change, rows in (
        (lambda c: c.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
        (lambda c: c.batch_select_indices(torch.tensor([1, 2])), [1, 2]),
        (lambda c: c.batch_select_indices(torch.tensor([False, True, True])), [1, 2]),
        (lambda c: c.reorder_cache(torch.tensor([1, 1, 0])), [1, 1, 0]),
    ):
        cache = filled(model, ids[:, :9], mask)
        change(cache)
        assert cache.batch_size == len(rows)
        logits = model(ids[rows, 9:], past_key_values=cache).logits
        for row, source in zip(logits, rows, strict=True):
            if source == 1:
                assert relative_error(row, exact) < 1e-5


@torch.no_grad()
def test_copied_cache_is_independent(model, ids):
    cache = filled(model, ids[:, :9])
    again = copy.deepcopy(cache)
    model(ids[:, 9:10].flip(0), past_key_values=again)
    exact = model(ids, use_cache=False).logits[:, 9:]
    assert relative_error(model(ids[:, 9:], past_key_values=cache).logits, exact) < 1e-5


@torch.no_grad()
def test_reset_cache_equals_a_new_one(model, ids):
    cache = filled(model, ids[:2])
    cache.reset()
    assert (cache.get_seq_length(), cache.batch_size, cache.nbytes) == (0, -1, 0)
    exact = model(ids, use_cache=False).logits
    assert relative_error(model(ids, past_key_values=cache).logits, exact) < 1e-6
    assert cache.get_seq_length() == 14


@torch.no_grad()
def test_offloaded_cache_gives_equal_results(model, ids):
    exact = model(ids, use_cache=False).logits
    cache = filled(model, ids[:, :9], offload=True)
    assert relative_error(model(ids[:, 9:], past_key_values=cache).logits, exact[:, 9:]) < 1e-5
    options = {"max_new_tokens": 3, "do_sample": False}
    assert torch.equal(model.generate(ids, cache_implementation="offloaded", **options), model.generate(ids, **options))


@torch.no_grad()
def test_interface_of_transformers_caches(model, ids):
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    cache = filled(model, ids, mask)
    assert cache.get_seq_length() == cache.get_seq_length(2) == 14
    assert cache.get_mask_sizes(1, 0) == (15, 0)
    assert cache.get_query_offset() == 14
    assert cache.get_max_length() == -1
    assert cache.is_sliding == [False, True, False, False]
    # if all layers were "linear", which do not know their length, generation would pass the whole prompt again
    assert cache.is_linear == [False] * 4
    assert not cache.is_compileable
    assert not cache.is_croppable
    assert cache.is_initialized
    assert len(cache) == 4
    # lengths do not count padding; they start at each sequence's own first token
    assert cache.lengths.tolist() == [11, 14, 14]


@torch.no_grad()
def test_crop_raises_for_tokens_that_no_history_holds(model, ids):
    cache = filled(model, ids)
    with pytest.raises(ValueError, match=r"cannot drop its last tokens.*make_cache\(record=n\)"):
        cache.crop(-1)
    cache.activate_past_recording(2)
    with pytest.raises(ValueError, match="can drop its last 0 tokens, got 1"):
        cache.crop(-1)
    with pytest.raises(ValueError, match="negative number, got 3"):
        cache.crop(3)
    assert cache.is_croppable
    with pytest.raises(ValueError, match="positive number of tokens, got 0"):
        model.make_cache(record=0)


@torch.no_grad()
def test_history_holds_a_bounded_number_of_snapshots_and_inputs(model, ids):
    cache = filled(model, ids.repeat(1, 20), record=8)
    for _ in range(60):
        model(ids[:, :1], cache=cache)
        assert len(cache.history.snapshots) <= 6
        assert sum(map(len, cache.history.inputs)) <= 16
    assert cache.allocated_nbytes > sum(part.allocated for layer in cache.layers for part in layer.parts.values())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"cache_implementation": "static"},
            "None, 'dynamic' or 'offloaded', got 'static'",
        ),
    ],
)
def test_unsupported_generation_raises(model, ids, options, message):
    with pytest.raises(ValueError, match=message):
        model.generate(ids[:1], max_new_tokens=3, **options)


def test_cache_with_gradient_checkpointing_raises(model, ids):
    # the cache would stay empty, so that later calls would lack these tokens
    model = copy.deepcopy(model).train()
    model.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="exclude each other"):
        model(ids, past_key_values=model.make_cache())
    with pytest.raises(ValueError, match=r"call model\.eval"):
        model.generate(ids, max_new_tokens=3)


def test_other_cache_class_or_batch_size_raises(model, ids):
    from transformers import DynamicCache

    with pytest.raises(ValueError, match="must be a HybridCache"):
        model(ids, past_key_values=DynamicCache())
    with pytest.raises(ValueError, match="must be a HybridCache"):
        model.generate(ids, past_key_values=DynamicCache(), max_new_tokens=2)
    cache = filled(model, ids)
    with pytest.raises(ValueError, match="holds 3 sequences, got a batch of 2"):
        model(ids[:2], past_key_values=cache)


@torch.no_grad()
def test_known_length_is_allocated_once(model, ids):
    cache = model.make_cache(max_length=14)
    sizes = set()
    for part in ids.split([9, 1, 1, 1, 1, 1], 1):
        model(part, past_key_values=cache)
        sizes.add(cache.allocated_nbytes)
    assert len(sizes) <= 2
    assert cache.allocated_nbytes == cache.nbytes == model.state_bytes(14, 3)


@torch.no_grad()
def test_several_sampled_sequences_per_prompt(model, ids):
    torch.manual_seed(0)
    out = model.generate(ids, max_new_tokens=4, do_sample=True, num_return_sequences=2)
    assert out.shape == (6, 18)
    torch.manual_seed(0)
    without = model.generate(ids, max_new_tokens=4, do_sample=True, num_return_sequences=2, use_cache=False)
    assert torch.equal(out, without)


@torch.no_grad()
def test_chunked_prefill(model, ids):
    mask = torch.ones_like(ids)
    mask[0, :6] = 0
    options = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False}
    whole = model.generate(ids, **options)
    for size in (1, 4, 5):
        assert torch.equal(model.generate(ids, prefill_chunk_size=size, **options), whole), size


def test_generation_from_a_cache_of_the_whole_prompt_raises(model, ids):
    with torch.no_grad():
        cache = model(ids, use_cache=True).past_key_values
    for prompt in (ids, ids[:, :-1]):
        with pytest.raises(ValueError, match="no new token is left"):
            model.generate(prompt, past_key_values=cache, max_new_tokens=2)
        with pytest.raises(ValueError, match="no new token is left"):
            model.generate(prompt, past_key_values=cache, max_new_tokens=2, num_beams=2)
    longer = torch.cat((ids, ids[:, :1]), 1)
    plain = model.generate(longer, max_new_tokens=2, do_sample=False)
    assert torch.equal(model.generate(longer, past_key_values=cache, max_new_tokens=2, do_sample=False), plain)


@torch.no_grad()
def test_assistant_models_change_no_token(model, ids):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    llama = LlamaForCausalLM(LlamaConfig(vocab_size=model.config.vocab_size, pad_token_id=0, **sizes)).eval()
    # a draft model that is often right: our model with other weights in one layer
    near = copy.deepcopy(model)
    near.model.layers[1].mixer.o_proj.weight.mul_(0.9)
    options = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}
    for main, assistant in ((llama, model), (model, llama), (model, near)):
        assert torch.equal(
            main.generate(ids[:1], assistant_model=assistant, **options), main.generate(ids[:1], **options)
        )
