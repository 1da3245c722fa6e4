"""Kernels run on the GPU where there is one, else in Triton's interpreter; tests marked `gpu` need one."""

import pytest
import torch

from tokenmix_core.testing.fixtures import (  # noqa: F401
    device,
    kernels_are_interpreted_quickly,
    launch_cache_is_empty,
    override,
    pytest_collection_modifyitems,
    pytest_runtest_setup,
    unwritten_memory_is_nan,
)


@pytest.fixture(scope="session")
def tokenizer():
    from tokenmix_core.data.tokenizer import byte_tokenizer

    return byte_tokenizer()


@pytest.fixture(scope="session")
def text_file(tmp_path_factory):
    """Write a text of about 20 kB."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(" ".join(f"Sentence {i} says {(i * i) % 97}." for i in range(1000)))
    return str(path)


@pytest.fixture(scope="session")
def token_file(tmp_path_factory):
    """Write a token file of 60 documents, a third of them held out."""
    from support.corpora import documents, token_file

    return str(token_file(tmp_path_factory.mktemp("corpus"), documents(60), held_out=0.3))


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory, tokenizer):
    """Save a hybrid of two layers with the byte tokenizer; tests only read it."""
    from tokenmix_core.modeling import HybridConfig, HybridForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 264, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    options = {"gated_delta_net": {"num_heads": 1, "head_dim": 16}, "attention": {"num_heads": 2}}
    special = {name: getattr(tokenizer, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    config = HybridConfig(**sizes, **special, mixers=["gated_delta_net", "attention"], mixer_options=options)
    folder = tmp_path_factory.mktemp("model") / "checkpoint"
    HybridForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
