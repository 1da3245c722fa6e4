"""NAtS-L in vLLM: tokens equal those of `generate`."""

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed: nox -s vllm")

from served_by_vllm import check_served
from tokenmix_nats_l import NatsLConfig, NatsLForCausalLM

OPTIONS = {
    "gated_delta_net": {"num_heads": 2, "head_dim": 8},
    "attention": {"num_heads": 4, "head_dim": 64},
    "nats_l": {"num_heads": 2, "head_dim": 16, "num_softmax_heads": 4},
}


@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize(
    "labels", [("nats_l",), ("nats_l", "gated_delta_net", "nats_l", "attention")], ids=["pure", "interleaved"]
)
def test_heads_retain_chunks_in_pages_of_a_slot(labels, prefix_caching, tmp_path):
    torch.manual_seed(0)
    sizes = {"vocab_size": 199, "hidden_size": 64, "num_hidden_layers": len(labels), "intermediate_size": 96}
    options = {label: OPTIONS[label] for label in dict.fromkeys(labels)}
    config = NatsLConfig(**sizes, mixers=list(labels), mixer_options=options, initializer_range=0.3, eos_token_id=0)
    check_served(NatsLForCausalLM(config), tmp_path, prefix_caching=prefix_caching)
