"""Finetuning trains a converted model, or its scorers alone, adapts λ, resumes, and saves a model that generates."""

import json
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tokenmix_core.data.tokenizer import byte_tokenizer
from tokenmix_lte.cli import main
from tokenmix_lte.finetune import finetune

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
RUN += " --micro_batch_tokens 64 --logging_steps 1 --precision fp32 --learning_rate 1e-2 --min_learning_rate 1e-3"
RUN += " --weight_decay 0 --dataloader_num_workers 0 --save_steps 2"


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SIZES, initializer_range=0.3)).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def converted(llama, tmp_path_factory):
    folder = tmp_path_factory.mktemp("made") / "converted"
    call = ["convert", str(llama), "--layers", "1", "--window", "16", "--cap", "6", "--sinks", "2"]
    assert main([*call, "--out", str(folder)]) == 0
    return folder


def weights(folder):
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


@pytest.mark.parametrize("flags", [[], ["--scorer"]])
def test_the_scorers_learn_alone_or_with_all_other_weights(converted, tmp_path, flags, capsys):
    assert main(["finetune", str(converted), *flags, "--out", str(tmp_path / "run"), *RUN.split()]) == 0
    assert "trained 4 steps" in capsys.readouterr().out
    before, after = weights(converted), weights(tmp_path / "run")
    assert set(before) == set(after)
    frozen = {name for name in before if torch.equal(before[name], after[name])}
    others = {name for name, _ in AutoModelForCausalLM.from_pretrained(converted).named_parameters()}
    scorers = {name for name in others if ".scorer." in name}
    assert scorers
    # λ does not change before step 32, but the average of retained keys does
    assert frozen & others == (others - scorers if flags else set())
    assert after["model.layers.1.mixer.sparsity.average"].all()
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    # before training the scorer retains all 26 tokens with final logits, a share of 1, logged as 32 of a row
    assert next(line["kept/1"] for line in lines if "kept/1" in line) == pytest.approx(32)
    assert main(["generate", str(tmp_path / "run"), "--prompt", "def ", "--max-new-tokens", "40"]) == 0
    assert "def " in capsys.readouterr().out


def test_a_stopped_run_goes_on_from_its_folder_alone(converted, tmp_path, capsys):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert main(["finetune", str(converted), "--scorer", "--out", str(whole), *RUN.split()]) == 0
    # simulate a run that was killed after its first checkpoint
    shutil.copytree(whole, cut)
    shutil.rmtree(cut / "checkpoint-4")
    for path in cut.glob("*.safetensors"):
        path.unlink()
    assert main(["finetune", "--resume", str(cut)]) == 0
    assert "trained 4 steps" in capsys.readouterr().out
    a, b = weights(whole), weights(cut)
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_a_resumed_run_of_a_trained_model_logs_the_counts_of_an_uninterrupted_one(converted, tmp_path):
    first, whole, cut = (tmp_path / name for name in ("first", "whole", "cut"))
    assert main(["finetune", str(converted), "--out", str(first), *RUN.split()]) == 0
    # the averages of a trained model do not start at 0
    assert main(["finetune", str(first), "--out", str(whole), *RUN.split()]) == 0
    shutil.copytree(whole, cut)
    shutil.rmtree(cut / "checkpoint-4")
    assert main(["finetune", "--resume", str(cut)]) == 0
    for folder in (whole, cut):
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        averages = weights(folder)["model.layers.1.mixer.sparsity.average"]
        assert [line["kept/1"] for line in lines if "kept/1" in line][-1] == pytest.approx(32 * float(averages.mean()))


def test_fields_of_the_model_apply_and_other_models_are_refused(converted, llama, tmp_path, capsys):
    call = ["--out", str(tmp_path / "run"), *RUN.split()]
    assert main(["finetune", str(llama), *call]) == 2
    assert f"run `tokenmix-lte convert {llama} --out FOLDER`" in capsys.readouterr().err
    assert main(["finetune", str(converted), *call, "--model.num_hidden_layers", "1"]) == 2
    assert "weights do not fit" in capsys.readouterr().err
    shutil.rmtree(tmp_path / "run", ignore_errors=True)
    assert main(["finetune", str(converted), *call, "--model.mixer_options.lte-16.cap", "9"]) == 0
    config = AutoModelForCausalLM.from_pretrained(tmp_path / "run").config
    assert config.mixer_options["lte-16"]["cap"] == 9
    call = ["convert", str(llama), "--scorer", "uniform", "--window", "16", "--out", str(tmp_path / "plain")]
    assert main(call) == 0
    with pytest.raises(ValueError, match="LTE layers that score keys"):
        finetune(str(tmp_path / "plain"))
