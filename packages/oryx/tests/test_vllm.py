"""Oryx in vLLM: tokens equal those of `generate`, in the configuration's mode and in modes that requests give."""

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed: nox -s vllm")

from vllm.exceptions import VLLMValidationError  # pyright: ignore[reportMissingImports]

from served_by_vllm import check_served, engine, generated_tokens, prompts_of, served_tokens
from tokenmix_core.integrations.vllm.request_inputs import RequestInputs
from tokenmix_oryx import OryxConfig, OryxForCausalLM

OPTIONS = {
    "oryx": {"head_dim": 16},
    "gated_delta_net": {"num_heads": 2, "head_dim": 8},
    "attention": {"num_heads": 4, "head_dim": 64},
}


def tiny(linear_mixer, mode, labels=("oryx",)):
    torch.manual_seed(0)
    options = {label: OPTIONS[label] for label in labels}
    options["oryx"] = options["oryx"] | {"linear_mixer": linear_mixer}
    sizes = {"vocab_size": 199, "hidden_size": 64, "num_hidden_layers": len(labels), "intermediate_size": 96}
    config = OryxConfig(
        **sizes, mixers=list(labels), mixer_options=options, mode=mode, initializer_range=0.3, eos_token_id=0
    )
    return OryxForCausalLM(config).eval()


@pytest.mark.parametrize("mode", ["attention", "linear"])
@pytest.mark.parametrize("linear_mixer", ["mamba2", "gated_delta_net"])
def test_the_mode_of_the_configuration(linear_mixer, mode, tmp_path):
    check_served(tiny(linear_mixer, mode), tmp_path)


def test_interleaved_with_other_mixers(tmp_path):
    check_served(tiny("gated_delta_net", "attention", ("oryx", "gated_delta_net", "attention")), tmp_path)


def test_requests_give_their_modes(tmp_path):
    model = tiny("gated_delta_net", "attention")
    model.save_pretrained(tmp_path)
    prompts = prompts_of(model.config.vocab_size)
    given = [("linear", "attention", None)[i % 3] for i in range(len(prompts))]
    expected = [
        generated_tokens(model, [prompt], **({} if mode is None else {"mode": mode}))[0]
        for prompt, mode in zip(prompts, given, strict=True)
    ]
    assert expected != generated_tokens(model, prompts)
    requests = [None if mode is None else {"mode": mode} for mode in given]
    name = f"{RequestInputs.__module__}:{RequestInputs.__qualname__}"
    options = {"dtype": "float32", "enable_prefix_caching": False, "logits_processors": [name]}
    with engine(tmp_path, **options) as llm:
        for _ in range(2):
            assert served_tokens(llm, prompts, requests=requests)[0] == expected
        with pytest.raises(VLLMValidationError, match="a mode must be 'linear' or 'attention', got 'softmax'"):
            served_tokens(llm, prompts[:1], requests=[{"mode": "softmax"}])
        assert served_tokens(llm, prompts, requests=requests)[0] == expected
