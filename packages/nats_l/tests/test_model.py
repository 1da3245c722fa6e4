"""The model family: contracts of every family, and the paper's sizes."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch

from support.exporting import check_exports
from support.two_ranks import check_sharded_in_bfloat16
from tokenmix_core.modeling.cache_name import CACHE
from tokenmix_core.testing.closeness import relative_error
from tokenmix_core.testing.models import ModelContract
from tokenmix_nats_l.config import NatsLConfig
from tokenmix_nats_l.model import NatsLForCausalLM, NatsLModel

SIZES: dict[str, Any] = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48}
OPTIONS = {"num_heads": 2, "head_dim": 8, "num_softmax_heads": 4}


class TestNatsLModel(ModelContract):
    configs: ClassVar[dict[str, dict[str, Any]]] = {
        "pure": {**SIZES, "mixer_options": {"nats_l": {**OPTIONS, "rope": True}}},
        "hybrid": {
            **SIZES,
            "mixers": ["gated_delta_net", "nats_l"],
            "mixer_options": {"nats_l": OPTIONS, "gated_delta_net": {"num_heads": 2, "head_dim": 8}},
        },
    }
    traced: ClassVar[dict[str, dict[str, Any]]] = {"pure": configs["pure"] | {"num_hidden_layers": 1}}
    config_class = NatsLConfig
    model_class = NatsLModel
    causal_lm_class = NatsLForCausalLM
    # more than one chunk, so that the type of the first has an effect
    tokens = 75


@pytest.mark.parametrize("types", ["learned", "lls"])
def test_one_exported_program_takes_any_length(types):
    torch.manual_seed(0)
    config = NatsLConfig(
        **SIZES, initializer_range=0.2, mixer_options={"nats_l": {**OPTIONS, "types": types, "softmax_share": None}}
    )
    check_exports(NatsLForCausalLM(config))


def test_a_compiled_training_step_has_the_gradients_of_eager_code():
    torch.manual_seed(0)
    model = NatsLForCausalLM(NatsLConfig(**TestNatsLModel.traced["pure"], initializer_range=0.2))
    ids, found = torch.randint(0, 61, (2, 75)), []
    for run in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
        model.zero_grad()
        run(ids, labels=ids, use_cache=False).loss.backward()
        found.append({name: p.grad for name, p in model.named_parameters()})
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.slow
def test_fsdp2_of_a_model_in_bfloat16_keeps_float32_rates(tmp_path):
    check_sharded_in_bfloat16(NatsLConfig(**TestNatsLModel.configs["hybrid"]), tmp_path)


def test_the_share_of_softmax_chunks_is_among_the_outputs():
    model = NatsLForCausalLM(NatsLConfig(**TestNatsLModel.configs["pure"]))
    out = model(torch.randint(0, 61, (2, 140)), use_cache=False)
    assert out.auxiliary["softmax_share"].shape == (2, 2)


@torch.no_grad()
def test_rows_have_adapters_of_the_chunks_scores_with_a_cache_and_padding():
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model = NatsLForCausalLM(NatsLConfig(**TestNatsLModel.configs["pure"])).eval()
    config = peft.LoraConfig(r=2, target_modules=["score_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(model, config, adapter_name="first").eval()
    adapted.add_adapter("second", config)
    ids, lengths, names = torch.randint(3, 61, (3, 200)), [200, 130, 2], ["first", "second", "second"]
    left = (torch.arange(200) >= 200 - torch.tensor(lengths).unsqueeze(1)).long()

    def continued(rows, mask, **given):
        """Return the logits of a prompt and of 70 tokens that follow in one call, in which chunks of some rows end."""
        begun = adapted(input_ids=rows[:, :-70], attention_mask=mask[:, :-70], use_cache=True, **given)
        more = adapted(input_ids=rows[:, -70:], attention_mask=mask, **{CACHE: begun[CACHE]}, **given)
        return torch.cat((begun.logits, more.logits), 1)

    ids, left = torch.cat((ids, ids[:, :70]), 1), torch.cat((left, left.new_ones(3, 70)), 1)
    together = continued(ids, left, adapter_names=names)
    options = {"max_new_tokens": 70, "do_sample": False, "eos_token_id": None}
    sampled = adapted.generate(
        input_ids=ids[:, :200], attention_mask=left[:, :200], adapter_names=names, **options
    )[:, -70:]  # fmt: skip
    outputs = {}
    for name in ("first", "second"):
        adapted.set_adapter(name)
        for i, n in enumerate(lengths):
            alone = continued(ids[i : i + 1, -n - 70 :], left[i : i + 1, -n - 70 :])[0]
            outputs[name, i] = alone
            if name == names[i]:
                assert relative_error(together[i, -n - 70 :], alone) < 1e-4, (name, i)
                expected = adapted.generate(input_ids=ids[i : i + 1, 200 - n : 200], **options)[0, -70:]
                assert torch.equal(sampled[i], expected), (name, i)
    # the two adapters lead to different types
    assert relative_error(outputs["first", 0], outputs["second", 0]) > 1e-3
