"""Test options that other libraries pass, sizes they read, classification heads, and auxiliary losses they drop."""

import copy
import pickle

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    Trainer,
    TrainingArguments,
)

from tokenmix_core.data.tokenizer import byte_tokenizer
from tokenmix_core.modeling import HybridConfig, HybridForCausalLM

SIZES = {"vocab_size": 259, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "pad_token_id": 256}
IDS = torch.arange(24).view(2, 12)
GDN = {"num_heads": 2, "head_dim": 16}


def config(**fields):
    options = {"attention": {"num_heads": 4, "num_kv_heads": 2}, "gated_delta_net": GDN}
    return HybridConfig(**SIZES | {"mixers": ["attention", "gated_delta_net"], "mixer_options": options} | fields)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return HybridForCausalLM(config()).eval()


@pytest.mark.parametrize("name", ["output_attentions", "head_mask", "token_type_ids", "output_router_logits"])
def test_an_option_given_as_none_or_false_is_not_given_and_a_requested_one_raises(model, name):
    for call in (model, model.model):
        for value in (None, False):
            assert torch.equal(call(IDS, **{name: value})[0], call(IDS)[0])
        with pytest.raises(ValueError, match=name):
            call(IDS, **{name: True})
    with pytest.raises(ValueError, match=name):
        model(IDS, **{name: torch.ones(2, 12)} if name != "output_attentions" else {name: True})


def test_generation_stops_at_strings(model):
    tokenizer = byte_tokenizer()
    options = {"max_new_tokens": 8, "do_sample": False, "tokenizer": tokenizer}
    free = model.generate(IDS[:1], **options)
    word = tokenizer.decode(free[0, 12:13])
    for beams in (1, 2):
        assert model.generate(IDS[:1], stop_strings=[word], num_beams=beams, **options).shape[1] <= free.shape[1]
    assert torch.equal(model.generate(IDS[:1], stop_strings=[word], **options), free[:, :13])


def test_sizes_of_attention_are_readable_and_follow_from_the_options(tmp_path):
    sizes = config()
    assert (sizes.num_attention_heads, sizes.num_key_value_heads, sizes.head_dim) == (4, 2, 8)
    assert sizes.to_dict()["num_attention_heads"] == 4
    assert HybridConfig.from_dict(sizes.to_dict()).to_dict() == sizes.to_dict()
    assert HybridConfig(**sizes.to_dict()).labels == sizes.labels
    sizes.save_pretrained(tmp_path)
    assert "num_attention_heads" not in (tmp_path / "config.json").read_text()
    recurrent = config(mixers=["gated_delta_net"], mixer_options={"gated_delta_net": GDN})
    assert (recurrent.num_attention_heads, recurrent.head_dim) == (2, 16)
    assert not hasattr(recurrent, "num_key_value_heads")
    mixed = config(
        mixers=["a", "b"], mixer_options={x: {"type": "attention", "num_heads": n} for x, n in (("a", 2), ("b", 4))}
    )
    assert not hasattr(mixed, "num_attention_heads")
    with pytest.raises(ValueError, match="num_attention_heads follows from mixer_options: it is 4, got 8"):
        config(num_attention_heads=8)


def test_configurations_have_an_auto_map_that_is_empty_unless_code_was_registered(tmp_path):
    plain = config()
    assert not plain.auto_map
    assert "auto_map" not in plain.to_dict()
    assert copy.deepcopy(plain).auto_map == plain.auto_map
    HybridConfig.from_dict(plain.to_dict() | {"auto_map": {"AutoConfig": "mine.Config"}}).save_pretrained(tmp_path)
    assert HybridConfig.from_pretrained(tmp_path).auto_map == {"AutoConfig": "mine.Config"}


@pytest.mark.parametrize(
    ("auto", "labels"),
    [
        (AutoModelForSequenceClassification, {"labels": torch.tensor([0, 1])}),
        (AutoModelForTokenClassification, {"labels": torch.arange(24).view(2, 12) % 2}),
        (
            AutoModelForQuestionAnswering,
            {f"{end}_positions": torch.tensor([1, 5]) for end in ("start", "end")},
        ),
    ],
)
def test_a_classifier_has_the_language_models_backbone_and_trains(auto, labels, model, tmp_path):
    model.save_pretrained(tmp_path / "language")
    classifier = auto.from_pretrained(tmp_path / "language").train()
    for name, x in model.model.state_dict().items():
        assert torch.equal(classifier.model.state_dict()[name], x)
    classifier.save_pretrained(tmp_path / "classifier")
    again = auto.from_pretrained(tmp_path / "classifier").eval()
    pickled = pickle.loads(pickle.dumps(classifier)).eval()
    classifier.eval()
    for other in (again, pickled):
        assert torch.equal(other(input_ids=IDS, **labels).loss, classifier(input_ids=IDS, **labels).loss)
    rows = [{"input_ids": IDS[i], **{name: x[i] for name, x in labels.items()}} for i in range(2)]
    args = TrainingArguments(
        str(tmp_path / "out"),
        use_cpu=True,
        max_steps=2,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=2,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
    )
    expected = classifier(input_ids=IDS, **labels).loss.item()
    if auto is AutoModelForTokenClassification:
        classifier.dropout.p = 0.0
    trainer = Trainer(classifier, args, train_dataset=rows)
    trainer.train()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(expected, abs=1e-4)


def test_a_classifier_reads_the_last_real_token_of_each_row(model):
    torch.manual_seed(0)
    classifier = AutoModelForSequenceClassification.from_config(config()).eval()
    alone = torch.cat([classifier(input_ids=row[None]).logits for row in (IDS[0], IDS[1, :7])])
    padded = torch.stack((IDS[0], torch.nn.functional.pad(IDS[1, :7], (0, 5), value=256)))
    out = classifier(input_ids=padded, attention_mask=(padded != 256).long())
    torch.testing.assert_close(out.logits, alone)


def test_flop_counters_count_the_loss(model):
    with FlopCounterMode(display=False) as whole:
        model.train()(input_ids=IDS, labels=IDS).loss.backward()
    with FlopCounterMode(display=False) as backbone:
        model.model(input_ids=IDS).last_hidden_state.sum().backward()
    # forward, and the gradients of hidden states and weight
    assert whole.get_total_flops() - backbone.get_total_flops() == 3 * 2 * model.lm_head.weight.numel() * IDS.numel()
