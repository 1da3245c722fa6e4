"""Test that evaluation on a GPU gives the same results as on a CPU, and measures the GPU."""

import copy

import pytest
import torch

from tokenmix_core.data.synthetic import mqar
from tokenmix_core.evaluation.efficiency import Stopwatch, measure_inference, measure_training
from tokenmix_core.evaluation.perplexity import token_losses
from tokenmix_core.evaluation.recall import generate_text, score_recall

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def on_gpu(model):
    return copy.deepcopy(model).to("cuda")


def test_losses_and_scores_are_those_of_the_cpu(model, on_gpu):
    ids = torch.randint(0, 259, (2, 70), generator=torch.Generator().manual_seed(0))
    expected = token_losses(model, ids)
    for piece in (None, 32):
        torch.testing.assert_close(token_losses(on_gpu, ids.cuda(), piece=piece).cpu(), expected, rtol=2e-2, atol=2e-2)
    examples = mqar(4, seq_len=64, num_pairs=4, vocab_size=264)
    assert score_recall(on_gpu, examples)[1] == pytest.approx(score_recall(model, examples)[1], rel=2e-2)


def test_generation_in_a_batch_is_generation_alone(on_gpu, tokenizer):
    prompts = ["a", "a longer prompt"]
    together = generate_text(on_gpu, tokenizer, prompts, max_new_tokens=4)
    assert together == [generate_text(on_gpu, tokenizer, [p], max_new_tokens=4)[0] for p in prompts]


def test_times_and_memory_are_the_devices(on_gpu):
    row = measure_inference(on_gpu, 256, batch_size=2, decode_tokens=4, repeats=2)
    assert 0 < row["prefill ms"] < 1e4
    # the peak includes the cache and the weights
    weights = sum(p.numel() * p.element_size() for p in on_gpu.parameters())
    assert row["peak bytes"] >= weights + row["cache bytes"]


def test_training_is_measured_on_the_device(llama):
    row = measure_training(copy.deepcopy(llama).to("cuda"), 64, repeats=2)
    assert row["peak bytes"] > sum(p.numel() * p.element_size() for p in llama.parameters())


def test_the_stopwatch_waits_for_the_kernels():
    x = torch.randn(4096, 4096, device="cuda")

    def work(times):
        for _ in range(times):
            x @ x

    watch = Stopwatch(x.device)
    watch.time(lambda: work(5))
    # launches take much less time than the matmuls
    assert 4 < watch.time(lambda: work(200)) / watch.time(lambda: work(20)) < 25
