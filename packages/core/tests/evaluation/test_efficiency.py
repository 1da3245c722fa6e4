"""Costs of inference: the bytes are those of the cache, the times are times."""

import torch
from transformers import DynamicCache

from tokenmix_core.evaluation.efficiency import (
    BENCH_SUITES,
    PeakMemory,
    cache_bytes,
    efficiency_suite,
    measure_inference,
    measure_training,
)
from tokenmix_core.evaluation.options import EvalOptions


def test_cache_bytes_are_keys_and_values_of_all_layers(llama):
    row = measure_inference(llama, 24, batch_size=3, decode_tokens=2, repeats=1)
    # 2 layers, keys and values, 3 rows of 24 tokens, 32 float32 each
    assert row["cache bytes"] == 2 * 2 * 3 * 24 * 32 * 4


def test_cache_bytes_are_what_the_model_declares(model):
    row = measure_inference(model, 24, batch_size=2, decode_tokens=2, repeats=1)
    declared = getattr(model, "state_bytes", None)
    assert row["cache bytes"] == (declared(24, 2) if declared else 2 * 2 * 2 * 24 * 32 * 4)


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


def test_peak_memory_sees_a_large_tensor_and_forgets_it():
    memory = PeakMemory(torch.device("cpu"))
    memory.reset()
    if (before := memory.bytes()) is None:
        return
    torch.ones(2**26)
    assert memory.bytes() >= before + 2**27
    memory.reset()
    assert memory.bytes() < before + 2**27


def test_suite_has_a_row_and_a_point_for_each_length(llama):
    options = EvalOptions(lengths=(32, 16), limit=1, progress=False)
    result = efficiency_suite(llama, None, options)
    assert [row["context"] for row in result["rows"]] == [16, 32]
    assert result["plots"][1]["series"]["cache"][1] == [2 * 2 * 16 * 128, 2 * 2 * 32 * 128]
    assert result["settings"]["parameters"] == llama.num_parameters()
    training = BENCH_SUITES["training"].run(llama, None, options)
    assert [row["context"] for row in training["rows"]] == [16, 32]
