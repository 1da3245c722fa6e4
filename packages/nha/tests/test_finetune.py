"""The two stages of finetuning train the stated parameters and save a complete model."""

import copy
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from tokenmix_core._utils.locks import FolderLock
from tokenmix_core.data.tokenizer import byte_tokenizer
from tokenmix_nha.cli import main
from tokenmix_nha.conversion import convert
from tokenmix_nha.finetune import finetune, freeze_all_but_attention, with_lora

SIZES = {
    "vocab_size": 264,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
RUN = "--sources mqar --mqar_vocab_size 200 --seq_len 32 --total_tokens 256 --warmup_tokens 0 --batch_tokens 64"
RUN += " --micro_batch_tokens 64 --logging_steps 1 --precision fp32 --learning_rate 1e-2 --weight_decay 0"
RUN += " --dataloader_num_workers 0"


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("converted")
    torch.manual_seed(0)
    convert(LlamaForCausalLM(LlamaConfig(**SIZES)), [4, "full"], slots=4).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def weights(folder):
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def test_stage_one_changes_the_attention_and_stage_two_everything(converted, tmp_path, capsys):
    first, second = tmp_path / "first", tmp_path / "second"
    assert main(["finetune", str(converted), "--stage", "1", "--out", str(first), *RUN.split()]) == 0
    before, after = weights(converted), weights(first)
    assert set(before) == set(after)
    for name in before:
        # no token enters the slots of a full layer, so that its gates are not trained
        still = "self_attn" not in name or name == "model.layers.1.self_attn.f_proj.weight"
        assert torch.equal(before[name], after[name]) == still, name
    pytest.importorskip("peft")
    call = ["finetune", str(first), "--stage", "2", "--rank", "2", "--out", str(second), *RUN.split()]
    assert main(call) == 0
    merged = weights(second / "merged")
    assert set(merged) == set(after)
    for name, weight in merged.items():
        if "norm" in name:
            assert torch.equal(weight, after[name]), name
        elif "layers.1.self_attn.f_proj" not in name:
            assert not torch.equal(weight, after[name]), name
            change = (weight - after[name]).float()
            assert torch.linalg.matrix_rank(change, rtol=1e-3) <= 2, name
    assert "the model is in" in capsys.readouterr().out
    model = AutoModelForCausalLM.from_pretrained(second / "merged")
    assert model.generate(torch.ones(1, 3, dtype=torch.int64), max_new_tokens=2).shape == (1, 5)


def test_finetuning_a_model_that_is_not_converted_fails_and_names_convert(tmp_path, capsys):
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(tmp_path / "llama")
    byte_tokenizer().save_pretrained(tmp_path / "llama")
    call = ["finetune", str(tmp_path / "llama"), "--stage", "1", "--out", str(tmp_path / "run"), *RUN.split()]
    assert main(call) == 2
    *_, last = capsys.readouterr().err.splitlines()
    assert "holds a model of type 'llama', whose attention is not NHA's" in last
    assert f"run `tokenmix-nha convert {tmp_path / 'llama'} --out FOLDER`" in last
    assert not (tmp_path / "run").exists()


def test_lora_reaches_experts_stored_in_one_tensor():
    pytest.importorskip("peft")
    torch.manual_seed(0)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8}
    model = convert(Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **experts)), 4, slots=4)
    before = copy.deepcopy(model.state_dict())
    tuned = with_lora(model, 2).train()
    ids = torch.randint(0, 264, (2, 16))
    optimizer = torch.optim.SGD([p for p in tuned.parameters() if p.requires_grad], lr=1.0)
    for _ in range(2):
        optimizer.zero_grad()
        tuned(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    after = tuned.merge_and_unload().state_dict()
    assert set(after) == set(before)
    for name, weight in before.items():
        assert torch.equal(after[name], weight) == ("norm" in name), name


def test_only_attention_requires_gradients_in_stage_one(converted):
    model = freeze_all_but_attention(AutoModelForCausalLM.from_pretrained(converted))
    assert all(p.requires_grad == (".self_attn." in name) for name, p in model.named_parameters())
    model.train().gradient_checkpointing_enable()
    model(torch.ones(1, 8, dtype=torch.int64), labels=torch.ones(1, 8, dtype=torch.int64)).loss.backward()
    assert model.model.layers[0].self_attn.q_proj.weight.grad.any()


def test_the_second_stage_has_another_order_of_rows(converted):
    first, second = (finetune(str(converted), stage).data for stage in (1, 2))
    assert first.data_seed != second.data_seed
    assert first.sources == second.sources


def test_wrong_stages_and_folders_are_refused(converted, tmp_path, capsys):
    with pytest.raises(ValueError, match="stage must be"):
        finetune(str(converted), 3)
    with pytest.raises(ValueError, match="rank must be"):
        finetune(str(converted), 2, rank=0)
    assert main(["finetune", str(tmp_path), "--stage", "1", "--out", str(tmp_path / "a")]) == 2
    assert "holds no model" in capsys.readouterr().err
    assert main(["finetune", str(converted), "--stage", "1", "--out", str(tmp_path / "a"), "--sead", "1"]) == 2
    assert "nearest is 'seed'" in capsys.readouterr().err


def test_a_stopped_stage_goes_on_from_its_folder_alone(converted, tmp_path, capsys):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for folder in (whole, cut):
        call = ["finetune", str(converted), "--stage", "1", "--out", str(folder), *RUN.split(), "--save_steps", "2"]
        assert main(call) == 0
    # simulate a run that was killed after its first checkpoint
    for path in cut.iterdir():
        if path.is_file() and path.suffix == ".safetensors":
            path.unlink()
    steps = sorted(int(path.name.split("-")[1]) for path in cut.glob("checkpoint-*"))
    for step in steps:
        if step > 2:
            shutil.rmtree(cut / f"checkpoint-{step}")
    assert steps[0] == 2
    assert main(["finetune", "--resume", str(cut)]) == 0
    assert "trained 4 steps" in capsys.readouterr().out
    a, b = weights(whole), weights(cut)
    assert all(torch.equal(a[name], b[name]) for name in a)
    with FolderLock(cut, "training"):
        assert main(["finetune", "--resume", str(cut)]) != 0
    assert "has been training there since" in capsys.readouterr().err
