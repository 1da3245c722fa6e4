"""Test SFT and adapters: first losses equal the model's own, also packed; frozen weights do not change."""

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from tests.post_training.models import AUXILIARY, build
from torchao.quantization import Int8WeightOnlyConfig, quantize_
from transformers import Trainer, TrainingArguments
from trl import SFTConfig, SFTTrainer

from tokenmix_core.integrations import count_auxiliary_losses
from tokenmix_core.training import parameter_groups

TEXTS = ["the first of several short texts", "another", "a third text, which is longer than all others", "x y z"]
IDS = torch.arange(40).view(2, 20)
LORA = LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", r=4)


def losses_of(trainer):
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def own_loss(model, tokenizer):
    """Return the cross-entropy of the model on rows without packing, one call per row, over all predicted tokens."""
    rows = [torch.tensor([tokenizer(text + tokenizer.eos_token).input_ids]) for text in TEXTS]
    items = sum(row.shape[1] - 1 for row in rows)
    total = 0.0
    for row in rows:
        out = model.train()(input_ids=row, labels=row, num_items_in_batch=items)
        total += out.loss.item()
        extra = [x.sum().item() for name, x in (out.auxiliary or {}).items() if name.endswith("_loss")]
        total -= sum(extra) / items
    return total


def sft(settings, model, tokenizer, trainer=SFTTrainer, peft_config=None, **more):
    args = SFTConfig(**settings | {"per_device_train_batch_size": 4}, max_length=128, shuffle_dataset=False, **more)
    data = Dataset.from_dict({"text": TEXTS})
    return trainer(model, args, train_dataset=data, processing_class=tokenizer, peft_config=peft_config)


@pytest.mark.parametrize("packing", [True, False], ids=["packed", "padded"])
@pytest.mark.filterwarnings("ignore:.*computes its own loss")
def test_the_first_loss_of_sft_is_the_models_own_on_its_rows(mixer, packing, settings, tokenizer):
    losses = losses_of(sft(settings, build(mixer), tokenizer, packing=packing))
    assert losses[0] == pytest.approx(own_loss(build(mixer), tokenizer), abs=2e-5)
    assert losses[1] < losses[0]


@pytest.mark.parametrize("mixer", AUXILIARY)
def test_auxiliary_losses_are_counted_by_a_derived_trainer_and_reported_without(mixer, settings, tokenizer):
    counted = losses_of(
        sft(settings, raised(build(mixer)), tokenizer, count_auxiliary_losses(SFTTrainer), packing=True)
    )
    # the budget of a call is of its mean share, so that the rows lie in one call here
    rows = [torch.tensor([tokenizer(text + tokenizer.eos_token).input_ids]) for text in TEXTS]
    positions = torch.cat([torch.arange(row.shape[1]) for row in rows])[None]
    packed = torch.cat(rows, 1)
    own = raised(build(mixer)).train()(input_ids=packed, labels=packed, position_ids=positions).loss.item()
    assert counted[0] == pytest.approx(own, abs=2e-5)
    with pytest.warns(UserWarning, match=r"does not include (budget|sparsity)_loss"):
        dropped = losses_of(sft(settings, raised(build(mixer)), tokenizer, packing=True))
    assert abs(dropped[0] - own) > 1e-3


def raised(model):
    """Give the sparsity loss of LTE a noticeable weight."""
    for name, x in model.named_buffers():
        if name.endswith("sparsity.weight"):
            x.fill_(1.0)
    return model


def test_lora_trains_its_adapters_alone_and_starts_at_the_base_models_loss(mixer, settings, tokenizer):
    base, model = build(mixer), build(mixer)
    before = {name: x.clone() for name, x in base.state_dict().items()}
    trainer = sft(
        settings, model, tokenizer, peft_config=LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear")
    )
    losses = losses_of(trainer)
    assert losses[0] == pytest.approx(own_loss(base, tokenizer), abs=2e-5)
    assert losses[1] < losses[0]
    for name, x in trainer.model.get_base_model().state_dict().items():
        if name.replace(".base_layer", "") in before and ".sparsity." not in name:
            assert torch.equal(x, before[name.replace(".base_layer", "")]), name


def test_qlora_starts_at_the_loss_of_the_dequantised_model(mixer):
    plain, model = build(mixer), build(mixer)
    quantize_(model, Int8WeightOnlyConfig(version=2))
    with torch.no_grad():
        for (name, x), y in zip(plain.named_parameters(), model.parameters(), strict=True):
            x.copy_(y.dequantize() if hasattr(y, "dequantize") and type(y) is not torch.nn.Parameter else y)
            assert name
    model = get_peft_model(model, LORA)
    loss = model.train()(input_ids=IDS, labels=IDS).loss
    assert loss.item() == pytest.approx(plain.train()(input_ids=IDS, labels=IDS).loss.item(), rel=1e-3)
    loss.backward()
    adapters = {name: x for name, x in model.named_parameters() if x.requires_grad}
    assert adapters
    assert all("lora_" in name and x.grad is not None for name, x in adapters.items())
    assert any(x.grad.abs().max() > 0 for x in adapters.values())


def test_prompt_tuning_prepends_its_embeddings(mixer):
    model = build(mixer).eval()
    tuned = get_peft_model(build(mixer), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)).eval()
    with torch.no_grad():
        prompt = tuned.prompt_encoder["default"].embedding.weight.expand(2, -1, -1)
        embeds = torch.cat((prompt, model.get_input_embeddings()(IDS)), 1)
        expected = model(inputs_embeds=embeds).logits
        torch.testing.assert_close(tuned(input_ids=IDS).logits, expected)


def test_prefix_tuning_is_refused_by_name(mixer):
    with pytest.raises(ValueError, match="prefix tuning makes such a cache and is not available"):
        get_peft_model(build(mixer), PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))(IDS, labels=IDS)


def test_decay_rates_and_gates_do_not_decay_in_a_plain_trainer(mixer, settings, tokenizer):
    model = build(mixer)
    before = {name: x.clone() for name, x in model.named_parameters()}
    optimizer = torch.optim.SGD(parameter_groups(model, 0.5), lr=0.5)
    # Oryx has layers that its mode does not use; an optimizer skips parameters without gradients
    used = set()
    for name, p in model.named_parameters():
        p.register_hook(lambda g, name=name: used.add(name) or torch.zeros_like(g))
    trainer = Trainer(
        model,
        TrainingArguments(**settings | {"max_steps": 1, "weight_decay": 0.0}),
        train_dataset=[{"input_ids": row, "labels": row} for row in IDS],
        optimizers=(optimizer, None),
    )
    trainer.train()
    for name, x in model.named_parameters():
        torch.testing.assert_close(x, before[name] * (0.75 if x.dim() >= 2 and name in used else 1), msg=name)
