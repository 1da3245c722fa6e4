"""Test padding-free batches of transformers' own collator, in its Trainer."""

import pytest
import torch
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

from tokenmix_core.modeling import HybridConfig, HybridForCausalLM
from tokenmix_core.testing.closeness import relative_error

FIELDS = {
    "vocab_size": 59,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "mixers": ["gated_delta_net", "mamba2", "attention"],
    "mixer_options": {
        "gated_delta_net": {"num_heads": 1, "head_dim": 16},
        "mamba2": {"head_dim": 16, "state_size": 16},
        "attention": {"num_heads": 2},
    },
    "initializer_range": 0.2,
}


@pytest.mark.parametrize(
    "options",
    [{}, {"return_flash_attn_kwargs": True}, {"return_seq_idx": True}, {"position_ids_start": 2},
     {"return_position_ids": False, "return_flash_attn_kwargs": True}],
    ids=["positions", "boundaries", "indices", "positions from 2", "boundaries alone"],
)  # fmt: skip
def test_trainer_loss_equals_separate_documents(options, tmp_path):
    torch.manual_seed(0)
    model = HybridForCausalLM(HybridConfig(**FIELDS))
    documents = [torch.randint(0, 59, (n,)).tolist() for n in (7, 1, 12, 5)]
    sums = [model(ids, labels=ids, num_items_in_batch=1).loss for ids in map(torch.tensor, ([d] for d in documents))]
    exact = sum(sums) / sum(len(d) - 1 for d in documents)
    exact.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    args = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=1,
        per_device_train_batch_size=4,
        learning_rate=0.0,
        max_grad_norm=0.0,
        logging_steps=1,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
    )
    trainer = Trainer(
        model, args, train_dataset=[{"input_ids": d} for d in documents],
        data_collator=DataCollatorWithFlattening(**options),
    )  # fmt: skip
    batch = trainer.data_collator([{"input_ids": d} for d in documents])
    logits = model.eval()(**{name: x for name, x in batch.items() if name != "labels"}).logits[0]
    apart = torch.cat([model(torch.tensor([d]), use_cache=False).logits[0] for d in documents])
    assert relative_error(logits, apart) < 1e-5
    kept = {}
    for name, p in model.named_parameters():
        p.register_hook(lambda gradient, name=name: kept.__setitem__(name, gradient.clone()))
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses == [pytest.approx(exact.item(), rel=1e-4)]
    for name, gradient in gradients.items():
        assert relative_error(kept[name], gradient) < 1e-4, name


def test_logits_are_none_in_training_by_default():
    torch.manual_seed(0)
    model, ids = HybridForCausalLM(HybridConfig(**FIELDS)), torch.randint(0, 59, (2, 9))
    quiet, asked = model(ids, labels=ids), model(ids, labels=ids, output_logits=True)
    assert quiet.logits is None
    assert torch.equal(quiet.loss, asked.loss)
    assert torch.equal(asked.logits, model(ids).logits)
    assert model.eval()(ids, labels=ids, output_logits=False).logits is None
