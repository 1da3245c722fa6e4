"""λ adapts to the retained keys: the rule, and equal results with resuming, accumulation and recomputation."""

from __future__ import annotations

import dataclasses
import shutil

import pytest
import torch
from transformers import TrainerCallback

from tokenmix_core.nn.head_weights import HeadWeights
from tokenmix_core.testing.fake_cuda_graph import assert_graphs_train_alike, graphs_everywhere
from tokenmix_core.training.callbacks import read_metrics
from tokenmix_core.training.recipe import DataRecipe, OptimizerRecipe, RunRecipe, Tokens
from tokenmix_core.training.trainer import train
from tokenmix_lte import training
from tokenmix_lte.model import LteForCausalLM
from tokenmix_lte.recipes import RECIPES, tiny
from tokenmix_lte.training import DECAY, SteerSparsity, steer_sparsity


@pytest.mark.parametrize(
    ("weight", "kept", "after"),
    [
        (0.1, 513, 0.15),
        (0.1, 512, 0.1),
        (0.1, 487, 0.1),
        (0.1, 486, 0.05),
        (0.9, 4000, 1.0),
        (1e-9, 4000, 1.5e-9),
        (1e-9, 100, 0.0),
        (1.5e-9, 100, 0.0),
        (0.0, 100, 0.0),
        (0.0, 4000, 1e-9),
    ],
)
def test_lambda_rises_above_the_target_and_falls_well_below_it(weight, kept, after):
    steer = SteerSparsity(512, 4096)
    got = steer.next_weights(torch.tensor([weight]), torch.tensor([kept / 4096]))
    torch.testing.assert_close(got, torch.tensor([after]))


def test_lambda_takes_52_updates_from_its_initial_value_to_1():
    steer, weight, updates = SteerSparsity(512, 4096), torch.tensor([1e-9]), 0
    while weight < 1:
        weight, updates = steer.next_weights(weight, torch.tensor([1.0])), updates + 1
    assert updates == 52


def test_the_average_spans_half_of_the_steps_between_updates():
    assert pytest.approx(15 / 17) == DECAY


class OneLayer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.heads = HeadWeights(2, initial=0.1)


def test_processes_average_their_observations(monkeypatch):
    models, steer = [OneLayer(), OneLayer()], SteerSparsity(2, 4)
    models[0].heads.observe(torch.tensor([[0.2, 1.0]]))
    models[1].heads.observe(torch.tensor([[0.4, 0.0], [0.6, 0.5]]))
    gathered = [torch.cat([m.heads.total, m.heads.count[None]]) for m in models]
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda x: x.copy_(gathered[0] + gathered[1]))
    state = type("State", (), {"global_step": 32})
    for model in models:
        steer.on_step_end(type("Args", (), {"world_size": 2}), state, None, model=model)
        torch.testing.assert_close(model.heads.average, torch.tensor([0.4, 0.5]) * (1 - DECAY))


def test_observations_and_lambda_stay_in_float32_in_a_bfloat16_model():
    model = OneLayer().bfloat16()
    # 257 is not representable in bfloat16
    model.heads.observe(torch.ones(257, 2, dtype=torch.bfloat16))
    assert {x.dtype for x in model.buffers()} == {torch.float32}
    assert float(model.heads.count) == 257
    torch.testing.assert_close(model.heads.weight, torch.full((2,), 0.1))


def nano(**model):
    recipe = tiny()
    lte = {"num_heads": 2, "num_kv_heads": 2, "window": 16, "cap": 4, "sinks": 1, "dropout": 0.0}
    return dataclasses.replace(
        recipe,
        model={
            **recipe.model,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "intermediate_size": 48,
            "mixer_options": {"gated_delta_net": {"num_heads": 2, "head_dim": 16, "expand_v": 1.0}, "lte": lte},
            **model,
        },
        data=DataRecipe(sources=["mqar"], seq_len=32, mqar_vocab_size=200, documents="joined"),
        optimizer=OptimizerRecipe(
            total_tokens=Tokens(128 * 6), batch_tokens=Tokens(128), micro_batch_tokens=Tokens(128), learning_rate=1e-2
        ),
        run=RunRecipe(logging_steps=1, save_steps=3, precision="fp32"),
    )


@pytest.fixture(autouse=True)
def updates_every_other_step(monkeypatch):
    monkeypatch.setattr(training, "EVERY", 2)


def lines(folder):
    names = ("loss", "kept/1", "lambda/1")
    return [[line[name] for name in names] for line in read_metrics(folder / "metrics.jsonl") if "loss" in line]


def test_gradients_of_each_example_in_training_mode_are_those_of_single_calls():
    torch.manual_seed(0)
    model = LteForCausalLM(nano().model_config()).train()
    for heads in (module for module in model.modules() if isinstance(module, HeadWeights)):
        # a large λ, so that the sparsity loss shows in the gradients
        heads.weight.fill_(0.5)
    ids = torch.randint(model.config.vocab_size, (2, 32))

    def loss(parameters, row):
        inputs = {"input_ids": row[None], "labels": row[None], "use_cache": False}
        return torch.func.functional_call(model, parameters, (), inputs).loss

    parameters = {name: x.detach() for name, x in model.named_parameters()}
    found = torch.vmap(torch.func.grad(loss), (None, 0), randomness="different")(parameters, ids)
    observed = [float(module.count) for module in model.modules() if isinstance(module, HeadWeights)]
    assert observed == [0]
    for i, row in enumerate(ids):
        model.zero_grad()
        loss(dict(model.named_parameters()), row).backward()
        for name, x in model.named_parameters():
            torch.testing.assert_close(found[name][i], x.grad, rtol=1e-4, atol=1e-6, msg=name)


class StopAt(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **_):
        if state.global_step == self.step:
            control.should_save = control.should_training_stop = True


def test_a_resumed_run_has_the_lambda_of_an_uninterrupted_run(tmp_path):
    recipe = nano()
    assert train(recipe, tmp_path / "whole", progress=False).step == 6
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    shutil.rmtree(tmp_path / "cut" / "checkpoint-6")
    train(recipe, tmp_path / "cut", resume=True, progress=False)
    assert lines(tmp_path / "cut") == lines(tmp_path / "whole")
    weights = [line[2] for line in lines(tmp_path / "whole")]
    first = read_metrics(tmp_path / "whole" / "metrics.jsonl")[0]
    # the first line of the log already counts all 26 tokens with final logits, for each head
    heads = [value for name, value in first.items() if name.startswith("kept/1/")]
    assert len(heads) == len([name for name in first if name.startswith("lambda/1/")]) > 1
    assert 28 < sum(heads) / len(heads) == pytest.approx(first["kept/1"])
    # nearly all of 32 keys are retained, above the target of 4
    assert weights == pytest.approx([1e-9, 1.5e-9, 1.5e-9, 2.25e-9, 2.25e-9, 3.375e-9])
    model = LteForCausalLM.from_pretrained(tmp_path / "cut")
    assert float(model.model.mixers[1].sparsity.weight.max()) == pytest.approx(3.375e-9)


@pytest.mark.parametrize("how", ["accumulated", "recomputed"])
def test_lambda_does_not_depend_on_accumulation_or_recomputation(how, tmp_path):
    recipe = nano()
    if how == "accumulated":
        changed = dataclasses.replace(
            recipe, optimizer=dataclasses.replace(recipe.optimizer, micro_batch_tokens=Tokens(32))
        )
    else:
        changed = dataclasses.replace(recipe, run=dataclasses.replace(recipe.run, gradient_checkpointing=True))
    train(recipe, tmp_path / "plain", progress=False)
    train(changed, tmp_path / how, progress=False)
    for got, expected in zip(lines(tmp_path / how), lines(tmp_path / "plain"), strict=True):
        assert got == pytest.approx(expected, rel=1e-4)


def test_cuda_graphs_draw_new_dropout_masks_and_agree_with_eager_training(tmp_path):
    options = nano().model["mixer_options"]
    plain = nano(mixer_options={**options, "lte": {**options["lte"], "dropout": 0.3}})
    graphed = dataclasses.replace(plain, run=dataclasses.replace(plain.run, training_graph="always"))
    train(plain, tmp_path / "plain", progress=False)
    with graphs_everywhere(eager=True) as works:
        train(graphed, tmp_path / "graphed", progress=False)
    assert len(works) == 1
    assert lines(tmp_path / "graphed") == lines(tmp_path / "plain")


def test_a_large_lambda_makes_heads_retain_fewer_keys(tmp_path, monkeypatch):
    monkeypatch.setattr(training, "RISE", 100.0)
    recipe = nano()
    recipe = dataclasses.replace(recipe, optimizer=dataclasses.replace(recipe.optimizer, total_tokens=Tokens(128 * 80)))
    train(recipe, tmp_path / "run", progress=False)
    kept = [line[1] for line in lines(tmp_path / "run")]
    # moving averages start at 0
    assert max(kept) > 20
    assert kept[-1] < max(kept) / 2


def test_models_without_scorers_or_with_several_caps_are_refused():
    options = {"num_heads": 2, "window": 16, "cap": 4, "sinks": 1}
    with pytest.raises(ValueError, match="that score keys"):
        steer_sparsity(nano(mixers=["lte"], mixer_options={"lte": {**options, "scorer": "none"}}))
    wide = {"type": "lte", **options, "cap": 5}
    with pytest.raises(ValueError, match="one cap, got 4, 5"):
        steer_sparsity(nano(mixers=["lte", "wide"], mixer_options={"lte": options, "wide": wide}))
    assert steer_sparsity(nano(mixers=["wide"], mixer_options={"wide": wide})).share == 5 / 32
    assert steer_sparsity(RECIPES["lalte-1.4b"]()).share == 512 / 4096
    with pytest.raises(ValueError, match="at least 1"):
        SteerSparsity(0, 10)


@pytest.mark.gpu
def test_graphs_train_alike(tmp_path):
    assert_graphs_train_alike(tiny(), tmp_path)
