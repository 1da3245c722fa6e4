"""Small models of two kinds, and small texts."""

import pytest
import torch

SIZES = {"vocab_size": 264, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}


@pytest.fixture(scope="session")
def tokenizer():
    from tokenmix_core.corpora.tokenizer import byte_tokenizer

    return byte_tokenizer()


def _llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SIZES, num_attention_heads=2, max_position_embeddings=1024))


def _hybrid():
    from tokenmix_core.modeling import HybridConfig, HybridForCausalLM

    options = {"gated_delta_net": {"num_heads": 1, "head_dim": 16}, "attention": {"num_heads": 2}}
    return HybridForCausalLM(HybridConfig(**SIZES, mixers=["gated_delta_net", "attention"], mixer_options=options))


@pytest.fixture(scope="session", params=[_llama, _hybrid], ids=["llama", "hybrid"])
def model(request):
    """A model of transformers' own, and one of ours; random weights, wide enough to make the logits differ."""
    torch.manual_seed(0)
    model = request.param().eval()
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(10)
    return model


@pytest.fixture(scope="session")
def llama():
    torch.manual_seed(0)
    return _llama().eval()


@pytest.fixture(scope="session")
def text_file(tmp_path_factory):
    """A text of about 20 kB."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(" ".join(f"Sentence {i} says {(i * i) % 97}." for i in range(1000)))
    return str(path)


@pytest.fixture(scope="session")
def token_file(tmp_path_factory):
    """A token file of 60 documents, a third of them held out."""
    from tokenmix_core.corpora.prepare import prepare

    folder = tmp_path_factory.mktemp("corpus")
    (folder / "texts").mkdir()
    for i in range(60):
        (folder / "texts" / f"{i:02}.txt").write_text(" ".join(f"word{(i * 7 + j) % 23}" for j in range(60)))
    prepare(str(folder / "texts"), folder / "tokens", held_out=0.3, progress=False)
    return str(folder / "tokens")
