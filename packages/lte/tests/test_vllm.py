"""laLTE and laNSA in vLLM: tokens equal those of `generate`."""

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed: nox -s vllm")

from served_by_vllm import check_served
from tokenmix_lte.config import LteConfig
from tokenmix_lte.model import LteForCausalLM

OPTIONS = {
    "attention": {"num_heads": 4, "head_dim": 64},
    "gated_delta_net": {"num_heads": 2, "head_dim": 8},
    "lte": {"num_heads": 4, "num_kv_heads": 2, "window": 13, "cap": 4, "sinks": 2, "dropout": 0.0},
    "nsa": {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "block": 4, "blocks": 3, "window": 6},
}


@pytest.mark.parametrize(
    "labels", [("gated_delta_net", "lte"), ("gated_delta_net", "nsa"), ("lte", "attention", "nsa")], ids="-".join
)
def test_hybrids(labels, tmp_path):
    torch.manual_seed(0)
    sizes = {"vocab_size": 199, "hidden_size": 64, "num_hidden_layers": len(labels), "intermediate_size": 96}
    options = {label: OPTIONS[label] for label in labels}
    config = LteConfig(**sizes, mixers=list(labels), mixer_options=options, initializer_range=0.3, eos_token_id=0)
    check_served(LteForCausalLM(config), tmp_path)
