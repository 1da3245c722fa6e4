"""The share of softmax chunks reaches its target: with documented scores, in training, resumed, on two processes."""

from __future__ import annotations

import os
import shutil

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tokenmix_core.training.callbacks import read_metrics
from tokenmix_core.training.overrides import overridden
from tokenmix_core.training.trainer import train
from tokenmix_nats_l.chunks import learned_types
from tokenmix_nats_l.mixer import NatsL
from tokenmix_nats_l.model import NatsLForCausalLM
from tokenmix_nats_l.share import ShareThreshold, adapt_thresholds

# docs/nats_l.md, "Why heads begin with one type": means and spreads of the score differences of two heads
STEPS = (0, 1, 5, 10, 40, 80)
MEANS = ((-0.03, -0.09, 0.21, 0.52, 0.89, -0.31), (-0.11, -0.22, -0.25, 0.21, 0.49, -0.01))
SPREADS = ((0.05, 0.06, 0.03, 0.06, 0.10, 0.12), (0.05, 0.10, 0.02, 0.07, 0.11, 0.11))


def inputs_and_weights(step: int, chunks: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Return mean inputs `[1, chunks, 3]` and weights `[3, 2]` whose scores have the documented mean and spread.

    The first input is the same for all chunks: the common mean, whose score drifts.
    """
    mean, spread = (torch.tensor([np.interp(step, STEPS, head) for head in table]) for table in (MEANS, SPREADS))
    x = torch.cat((torch.ones(1, chunks, 1), torch.randn(1, chunks, 2, generator=generator)), -1)
    return x, torch.cat((mean[None], spread.diag())).float()


def softmax_of(d: torch.Tensor, threshold: ShareThreshold | None):
    return learned_types(torch.cat((torch.zeros_like(d), d), -1), threshold)


@pytest.mark.parametrize("target", [0.1, 0.25, 0.5, 0.9])
def test_share_of_every_head_reaches_the_target_with_the_documented_scores(target):
    generator, threshold, shares = torch.Generator().manual_seed(0), ShareThreshold(3, 2, target), []
    plain = []
    for step in range(400):
        x, weights = inputs_and_weights(step, 32, generator)
        types = softmax_of((x - threshold.center) @ weights, threshold)
        threshold.observe(types.margin, x, torch.ones(1, 32))
        adapt_thresholds(threshold)
        shares.append(types.softmax.mean((0, 1)))
        plain.append(softmax_of(x @ weights, None).softmax.mean((0, 1)))
    # without a threshold one head has no softmax chunk in the end, the other nearly half
    assert torch.stack(plain[-100:]).mean(0).tolist() == pytest.approx([0.005, 0.46], abs=0.02)
    assert torch.stack(shares[-200:]).mean(0).tolist() == pytest.approx([target] * 2, abs=0.02)
    x, weights = inputs_and_weights(400, 10_000, generator)
    held_out = softmax_of((x - threshold.center) @ weights, threshold).softmax.mean()
    assert float(held_out) == pytest.approx(target, abs=0.03)


def test_update_equals_its_definition():
    threshold = ShareThreshold(1, 1, 0.25)
    torch.testing.assert_close(threshold.offset, torch.tensor([0.6744898]))
    d = torch.tensor([1.0, 2.0, 3.0, 6.0]).reshape(1, 4, 1)
    threshold.observe(d, 10 * d, torch.tensor([[1.0, 1.0, 1.0, 1.0]]))
    # slots without a chunk do not count, nor do steps without chunks
    threshold.observe(d, d, torch.zeros(1, 4))
    adapt_thresholds(threshold)
    offset = 0.6744898 + 0.4 * (1 - 0.25)
    torch.testing.assert_close(threshold.threshold, torch.tensor([offset * 3.5**0.5]))
    torch.testing.assert_close(threshold.center, torch.tensor([30.0]))
    before = {name: buffer.clone() for name, buffer in threshold.named_buffers()}
    adapt_thresholds(threshold)
    assert all(torch.equal(before[name], buffer) for name, buffer in threshold.named_buffers())


def test_gradients_pass_to_the_probability_beyond_the_threshold():
    threshold, d = ShareThreshold(1, 1, 0.5), torch.tensor([[[0.5], [2.0]]], requires_grad=True)
    threshold.threshold.fill_(1.0)
    types = softmax_of(d, threshold)
    assert types.softmax.flatten().tolist() == [0, 1]
    types.softmax.sum().backward()
    p = torch.sigmoid(d.detach() - 1)
    torch.testing.assert_close(d.grad, p * (1 - p))


def test_only_training_observes_and_the_threshold_stays_in_float32():
    layer, x = NatsL(32, num_heads=2, head_dim=8, num_softmax_heads=4, softmax_share=0.5), torch.randn(1, 150, 32)
    layer.eval()(x)
    assert float(layer.threshold.sums.sum()) == 0
    layer.train()(x, cu_seqlens=torch.tensor([0, 5, 150]))
    assert layer.threshold.sums[0].tolist() == [4, 4]
    assert {buffer.dtype for buffer in layer.bfloat16().threshold.buffers()} == {torch.float32}


def _observe_on(rank: int, path: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{path}/store", rank=rank, world_size=2)
    layer = ShareThreshold(1, 1, 0.25)
    margin = torch.tensor([1.0, 2.0] if rank else [3.0, 6.0]).reshape(1, 2, 1)
    layer.observe(margin, -margin, torch.ones(1, 2))
    adapt_thresholds(layer, processes=2)
    torch.save(layer.state_dict(), os.path.join(path, f"{rank}.pt"))
    dist.destroy_process_group()


def test_two_processes_adapt_to_the_chunks_of_both(tmp_path):
    mp.start_processes(_observe_on, (str(tmp_path),), nprocs=2, start_method="fork")
    alone = ShareThreshold(1, 1, 0.25)
    margin = torch.tensor([1.0, 2.0, 3.0, 6.0]).reshape(1, 4, 1)
    alone.observe(margin, -margin, torch.ones(1, 4))
    adapt_thresholds(alone)
    for rank in range(2):
        for name, buffer in torch.load(tmp_path / f"{rank}.pt").items():
            torch.testing.assert_close(buffer, alone.state_dict()[name])


@pytest.fixture(scope="module")
def small(small_recipe):
    flags = "--seq_len 256 --batch_tokens 1024 --micro_batch_tokens 512 --total_tokens 6144 --warmup_tokens 2048"
    return small_recipe(200, f"{flags} --documents joined", softmax_share=0.25)


def shares(folder):
    return [line["softmax_share/1"] for line in read_metrics(folder / "metrics.jsonl") if "loss" in line]


def test_share_reaches_the_target_in_training(small, tmp_path):
    small = overridden(small, ["--total_tokens", "205k", "--save_steps", "1000", "--micro_batch_tokens", "1024"])
    train(small, tmp_path, progress=False)
    assert np.mean(shares(tmp_path)[-60:]) == pytest.approx(0.25, abs=0.02)


def test_resumed_run_has_the_thresholds_of_an_uninterrupted_run(small, tmp_path):
    assert train(small, tmp_path / "whole", progress=False).step == 6
    # simulate a run that was killed after its third step
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    shutil.rmtree(tmp_path / "cut" / "checkpoint-6")
    train(small, tmp_path / "cut", resume=True, progress=False)
    assert shares(tmp_path / "cut") == shares(tmp_path / "whole")
    whole, cut = (NatsLForCausalLM.from_pretrained(tmp_path / name) for name in ("whole", "cut"))
    assert whole.model.mixers[1].threshold.steps == 6
    for name, buffer in whole.model.mixers[1].threshold.named_buffers():
        assert torch.equal(buffer, cut.model.mixers[1].threshold.get_buffer(name))
    # without `softmax_share` a layer has no such buffers, so that older checkpoints load without warnings
    assert not any("threshold" in name for name, _ in NatsL(32, num_softmax_heads=6).named_buffers())
