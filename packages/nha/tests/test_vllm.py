"""NHA in vLLM: tokens equal those of `generate`."""

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed: nox -s vllm")

from served_by_vllm import check_served
from tokenmix_nha import NhaConfig, NhaForCausalLM
from tokenmix_nha.windows import nha_layers


def check(windows, tmp_path, **options):
    torch.manual_seed(0)
    sizes = {"vocab_size": 199, "hidden_size": 24, "num_hidden_layers": len(windows), "intermediate_size": 32}
    layers = nha_layers(windows, num_heads=4, num_kv_heads=2, slots=5, gate_normalizer=2.0, **options)
    check_served(NhaForCausalLM(NhaConfig(**sizes, **layers, initializer_range=0.3, eos_token_id=0)), tmp_path)


def test_windows_and_slots(tmp_path):
    check([4, 70], tmp_path, head_dim=8)


def test_interleaved_with_full_attention(tmp_path):
    check([4, "full", 70], tmp_path, head_dim=64)
