"""accelerate's offloading of every layer: the model computes and generates the same."""

import copy

import torch
from accelerate import cpu_offload, disk_offload
from tests.post_training.models import build

IDS = torch.arange(40).view(2, 20)


@torch.no_grad()
def test_a_model_with_all_layers_offloaded_computes_and_generates_the_same(mixer, tmp_path):
    model = build(mixer).eval()
    options = {"max_new_tokens": 4, "do_sample": False}
    logits, tokens = model(IDS).logits, model.generate(IDS, **options)
    device = torch.device("cpu")
    for offloaded in (
        cpu_offload(copy.deepcopy(model), device),
        disk_offload(copy.deepcopy(model), str(tmp_path), device),
    ):
        assert offloaded.lm_head.weight.is_meta
        torch.testing.assert_close(offloaded(IDS).logits, logits)
        assert torch.equal(offloaded.generate(IDS, **options), tokens)
