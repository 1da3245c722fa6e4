"""Test the costs of inference: bytes are those of the cache, and times are positive."""

import copy
import gc
from types import FunctionType, ModuleType

import pytest
import torch
from transformers import DynamicCache

from tokenmix_core.data.tokenizer import byte_tokenizer
from tokenmix_core.evaluation.efficiency import (
    BENCH_SUITES,
    cache_bytes,
    efficiency_suite,
    measure_inference,
    measure_training,
)
from tokenmix_core.evaluation.options import EvalOptions
from tokenmix_core.modeling.cache_name import CACHE


def storage_bytes(cache):
    """Return the bytes of all tensors' storages in a cache, found by the garbage collector."""
    found, seen, left = {}, set(), [cache]
    while left:
        x = left.pop()
        if id(x) in seen or isinstance(x, type | ModuleType | FunctionType | torch.nn.Module):
            continue
        seen.add(id(x))
        if isinstance(x, torch.Tensor):
            found[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        else:
            left += gc.get_referents(x)
    return sum(found.values())


def test_cache_bytes_are_keys_and_values_of_all_layers(llama):
    row = measure_inference(llama, 24, batch_size=3, decode_tokens=2, repeats=1)
    # 2 layers, keys and values, 3 rows of 24 tokens, 32 float32 each
    assert row["cache bytes"] == 2 * 2 * 3 * 24 * 32 * 4


def test_bytes_in_use_are_those_that_the_model_declares(model):
    with torch.inference_mode():
        cache = getattr(model(torch.randint(0, 264, (2, 24)), use_cache=True), CACHE)
    declared = getattr(model, "state_bytes", None)
    assert cache_bytes(cache, allocated=False) == (declared(24, 2) if declared else 2 * 2 * 2 * 24 * 32 * 4)


def test_storages_are_counted_once():
    cache = DynamicCache()
    x = torch.zeros(1, 2, 8, 4)
    cache.update(x, x.transpose(1, 2).reshape(1, 2, 8, 4), 0)
    alone = cache_bytes(cache)
    cache.extra = [cache.layers[0].keys, {"again": cache.layers[0].keys[:, :1]}]
    assert cache_bytes(cache) == alone


def test_times_are_positive_and_rates_agree_with_them(model):
    row = measure_inference(model, 16, batch_size=2, decode_tokens=2, repeats=2)
    assert abs(row["prefill tokens/s"] * row["prefill ms"] / 1e3 - 2 * 16) < 1e-9
    assert abs(row["decode tokens/s"] * row["decode ms/token"] / 1e3 - 2) < 1e-9
    assert row["prefill ms"] > 0
    assert row["decode ms/token"] > 0


def test_training_is_measured_without_a_trace(model):
    before = {name: p.clone() for name, p in model.named_parameters()}
    row = measure_training(model, 16, batch_size=2, repeats=2)
    assert abs(row["tokens/s"] * row["step ms"] / 1e3 - 32) < 1e-9
    assert not model.training
    assert all(p.grad is None and torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_peak_memory_is_left_out_where_it_cannot_be_measured(model):
    for row in (measure_inference(model, 16, decode_tokens=2, repeats=1), measure_training(model, 16, repeats=1)):
        assert "peak bytes" not in row


def test_cache_bytes_are_those_of_the_storages(model):
    row = measure_inference(model, 24, batch_size=2, decode_tokens=40, repeats=1)
    with torch.inference_mode():
        output = model(torch.randint(0, 264, (2, 24)), use_cache=True)
        cache = getattr(output, CACHE)
        before = storage_bytes(cache)
        for _ in range(41):
            model(torch.zeros(2, 1, dtype=torch.long), use_cache=True, **{CACHE: cache})
    # besides keys and values the cache has a few integers, such as the number of tokens
    assert 0 <= before - row["cache bytes"] <= 64
    assert 0 <= storage_bytes(cache) - row["cache bytes, decoded"] <= 64
    # without spare slots, the content of the cache is smaller
    assert cache_bytes(cache, allocated=False) <= cache_bytes(cache)


def test_prompts_are_text_where_there_is_a_tokenizer(model, tmp_path):
    seen, model = [], copy.deepcopy(model)
    model.register_forward_pre_hook(lambda _, args, kwargs: seen.append(kwargs["input_ids"]), with_kwargs=True)
    (tmp_path / "text.txt").write_text("abcdefgh" * 3)
    options = EvalOptions(lengths=(16, 8), batch_size=2, limit=1, text=str(tmp_path / "text.txt"), progress=False)
    for suite in BENCH_SUITES.values():
        seen.clear()
        result = suite.run(model, byte_tokenizer(), options)
        # 24 letters and the end of the text, repeated to 32 tokens
        assert result["settings"]["prompt"] == f"{options.text}, repeated"
        ids = byte_tokenizer()("abcdefgh" * 3)["input_ids"] + [byte_tokenizer().eos_token_id]
        prompts = {x.shape: x for x in seen if x.shape[1] > 1}
        assert torch.equal(prompts[2, 16].flatten(), torch.tensor([*ids, *ids[:7]]))
        assert torch.equal(prompts[2, 8].flatten(), torch.tensor(ids[:16]))
        assert suite.run(model, None, options)["settings"]["prompt"] == "random tokens"
    model.get_output_embeddings().weight = torch.nn.Parameter(model.get_output_embeddings().weight[:90].clone())
    with pytest.raises(ValueError, match=r"the text has token \d+, beyond the model's vocabulary of 90"):
        efficiency_suite(model, byte_tokenizer(), options)


def test_suite_has_a_row_and_a_point_for_each_length(llama):
    options = EvalOptions(lengths=(32, 16), limit=1, progress=False)
    result = efficiency_suite(llama, None, options)
    assert [row["context"] for row in result["rows"]] == [16, 32]
    assert result["plots"][1]["series"]["cache"][1] == [2 * 2 * 16 * 128, 2 * 2 * 32 * 128]
    assert result["settings"]["parameters"] == llama.num_parameters()
    training = BENCH_SUITES["training"].run(llama, None, options)
    assert [row["context"] for row in training["rows"]] == [16, 32]
