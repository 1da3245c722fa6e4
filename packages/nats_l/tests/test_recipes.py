"""Recipes: the paper's sizes and settings, one change for each row of Table 4, and a log with the shares of types."""

import dataclasses
import shutil
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

from support.recipes import check_shrinks
from tokenmix_core.testing.fake_cuda_graph import graphs_everywhere
from tokenmix_core.training.callbacks import read_metrics
from tokenmix_core.training.overrides import overridden
from tokenmix_core.training.recipe import Tokens
from tokenmix_core.training.trainer import train
from tokenmix_nats_l.baselines import BASELINES
from tokenmix_nats_l.mixer import NatsL
from tokenmix_nats_l.recipes import ABLATIONS, HYBRID_LAYERS, RECIPES


def counted(name):
    recipe = RECIPES[name]()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(recipe.model_config())
    return model, sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("name", "stated", "within"),
    [
        ("nats-l-hybrid-380m", 380.07e6, 1e-3),
        ("nats-l-hybrid-800m", 793.14e6, 1e-3),
        ("nats-l-800m", 794e6, 1e-3),
        ("gdn-800m", 793e6, 0.01),
        ("mamba2-800m", 801e6, 0.01),
        ("transformer-800m", 778e6, 0.01),
        ("gdn-hybrid-800m", 802e6, 0.01),
        ("gdn-380m", 380e6, 0.01),
        ("mamba2-380m", 380e6, 0.01),
        ("transformer-380m", 380e6, 0.03),
        ("gdn-hybrid-380m", 380e6, 0.03),
    ],
)
def test_parameter_counts_equal_those_of_the_paper(name, stated, within):
    assert counted(name)[1] == pytest.approx(stated, rel=within)


def test_baselines_have_the_layers_of_section_5():
    layers = {kind: RECIPES[f"{kind}-800m"]().model["mixers"] for kind in BASELINES}
    assert {kind: len(mixers) for kind, mixers in layers.items()} == {
        "gdn": 21, "gdn-hybrid": 22, "transformer": 24, "mamba2": 48
    }  # fmt: skip
    assert layers["gdn-hybrid"].count("attention") == 5


@pytest.mark.parametrize(("size", "added"), [("380m", 30_720), ("800m", 59_904)])
def test_a_layer_adds_only_scores_output_weights_and_norms(size, added):
    model, _ = counted(f"nats-l-{size}")
    for mixer in model.model.mixers:
        assert mixer.score_proj.weight.numel() + mixer.weight_proj.weight.numel() == added


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_has_its_name_and_a_model(name):
    recipe = RECIPES[name]()
    assert recipe.name == name
    assert overridden(recipe).values() == recipe.values()
    model, parameters = counted(name)
    assert model.config.model_type == recipe.model_type
    assert parameters > 0
    assert any(isinstance(mixer, NatsL) for mixer in model.model.mixers) is bool(recipe.callbacks)


@pytest.mark.parametrize("size", ["380m", "800m"])
def test_settings_equal_appendix_a(size):
    recipe, config = RECIPES[f"nats-l-hybrid-{size}"](), RECIPES[f"nats-l-hybrid-{size}"]().model_config()
    assert recipe.optimizer.total_tokens == (15e9 if size == "380m" else 50e9)
    assert recipe.optimizer.warmup_tokens == (0.5e9 if size == "380m" else 1e9)
    assert recipe.optimizer.batch_tokens == 2**19
    rates = ("learning_rate", "initial_learning_rate", "min_learning_rate")
    assert [getattr(recipe.optimizer, rate) for rate in rates] == [3e-4, 3e-5, 3e-5]
    # the value in the authors' code
    assert recipe.optimizer.adam_epsilon == 1e-15
    assert recipe.data.seq_len == 4096
    assert "fineweb-edu" in recipe.data.sources[0]
    assert [i for i in range(21) if config.mixer_type(i) == "nats_l"] == list(HYBRID_LAYERS)
    assert not config.options_of(3)["rope"]
    pure = RECIPES[f"nats-l-{size}"]().model_config()
    assert all(pure.mixer_type(i) == "nats_l" and pure.options_of(i)["rope"] for i in range(21))


@pytest.mark.parametrize("name", ABLATIONS)
def test_ablations_differ_from_the_hybrid_only_in_their_option(name):
    ablation, hybrid = RECIPES[f"nats-l-hybrid-380m-{name}"](), RECIPES["nats-l-hybrid-380m"]()
    assert dataclasses.replace(ablation, name="", description="", model=hybrid.model) == dataclasses.replace(
        hybrid, name="", description=""
    )
    options, plain = (dict(recipe.model["mixer_options"]["nats_l"]) for recipe in (ablation, hybrid))
    assert options.items() - plain.items() == ABLATIONS[name].items()
    assert {**ablation.model, "mixer_options": None} == {**hybrid.model, "mixer_options": None}
    ((option, value),) = ABLATIONS[name].items()
    layers = {model: counted(model)[0].model.mixers[3] for model in (ablation.name, hybrid.name)}
    assert getattr(layers[ablation.name], option) == value
    assert getattr(layers[hybrid.name], option) != value


@pytest.mark.parametrize("size", ["small", "100m"])
def test_recall_models_differ_only_in_their_mixers(size):
    def settings(name):
        recipe = RECIPES[f"recall-{name}-{size}"]()
        return recipe.data, recipe.optimizer, {**recipe.model, "mixers": None, "mixer_options": None}

    for name in ("nats-l-hybrid", "nats-l-hybrid-no-decay", "gdn", "gdn-hybrid", "transformer"):
        assert settings(name) == settings("nats-l")
    hybrid, core = (RECIPES[f"recall-{name}-{size}"]().model["mixers"] for name in ("nats-l-hybrid", "gdn-hybrid"))
    assert [mixer.replace("nats_l", "attention") for mixer in hybrid] == core


@pytest.fixture(scope="module")
def small(small_recipe):
    flags = "--seq_len 128 --batch_tokens 256 --micro_batch_tokens 256 --total_tokens 1536 --warmup_tokens 256"
    return small_recipe(30, flags)


def with_options(recipe, **options):
    layers = recipe.model["mixer_options"]
    return dataclasses.replace(
        recipe, model={**recipe.model, "mixer_options": {**layers, "nats_l": {**layers["nats_l"], **options}}}
    )


def shares(folder):
    return {line["step"]: line["softmax_share/1"] for line in read_metrics(folder / "metrics.jsonl") if "loss" in line}


def test_log_has_the_share_of_softmax_chunks_of_every_layer(small, tmp_path):
    for types, share in (("softmax", 1.0), ("linear", 0.0), ("alternate", 0.5)):
        train(with_options(small, types=types), tmp_path / types, progress=False)
        assert shares(tmp_path / types) == dict.fromkeys(range(1, 7), share)
        first = read_metrics(tmp_path / types / "metrics.jsonl")[0]
        assert [first[f"softmax_share/1/{head}"] for head in (0, 1)] == [share, share]
        assert not any("share/0" in name for line in read_metrics(tmp_path / types / "metrics.jsonl") for name in line)


def test_log_line_has_the_mean_since_the_previous_one(small, tmp_path):
    micro = dataclasses.replace(small.optimizer, micro_batch_tokens=Tokens(128))
    for name, steps, optimizer in (("each", 1, small.optimizer), ("third", 3, micro)):
        recipe = dataclasses.replace(
            small, optimizer=optimizer, run=dataclasses.replace(small.run, logging_steps=steps, save_steps=6)
        )
        train(recipe, tmp_path / name, progress=False)
    each, third = shares(tmp_path / "each"), shares(tmp_path / "third")
    assert 0 < each[1] < 1
    # the log has a line for the first step
    assert third[1] == pytest.approx(each[1])
    assert third[3] == pytest.approx((each[2] + each[3]) / 2)
    assert third[6] == pytest.approx((each[4] + each[5] + each[6]) / 3)


def test_log_line_has_the_mean_over_all_chunks_of_unequal_batches():
    from types import SimpleNamespace

    import torch

    from tokenmix_nats_l.training import SteerShares

    log, model = SteerShares(), torch.nn.Identity()
    # layers with different head counts
    log._layers, log._heads, log._sums = [1, 2], [2, 1], torch.zeros(5, dtype=torch.float64)
    for share, chunks in ((1.0, 1), (0.25, 7)):
        shares = (torch.tensor([share, 0.0]), torch.tensor([0.5]))
        auxiliary = {"softmax_share": shares, "chunks": torch.tensor([chunks, chunks])}
        log._gather(model, (), SimpleNamespace(auxiliary=auxiliary))
    logs = {"loss": 0.0}
    log.on_log(SimpleNamespace(world_size=1), None, None, logs)
    expected = (1 + 0.25 * 7) / 8
    assert logs == {
        "loss": 0.0, "softmax_share/1": expected / 2, "softmax_share/1/0": expected, "softmax_share/1/1": 0.0,
        "softmax_share/2": 0.5, "softmax_share/2/0": 0.5,
    }  # fmt: skip


def test_resumed_run_logs_equal_shares(small, tmp_path):
    assert train(small, tmp_path / "whole", progress=False).step == 6
    # simulate a run that was killed after its third step
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    shutil.rmtree(tmp_path / "cut" / "checkpoint-6")
    train(small, tmp_path / "cut", resume=True, progress=False)
    assert len(shares(tmp_path / "whole")) == 6
    assert shares(tmp_path / "cut") == shares(tmp_path / "whole")


def test_cuda_graphs_log_the_same_shares(small, tmp_path):
    joined = dataclasses.replace(small, data=dataclasses.replace(small.data, documents="joined"))
    train(joined, tmp_path / "plain", progress=False)
    graphed = dataclasses.replace(joined, run=dataclasses.replace(joined.run, training_graph="always"))
    with graphs_everywhere(eager=True) as works:
        train(graphed, tmp_path / "graphed", progress=False)
    assert len(works) == 1
    assert shares(tmp_path / "graphed") == shares(tmp_path / "plain")


def test_model_without_nats_l_layers_logs_no_shares(small, tmp_path):
    layers = small.model["mixer_options"]
    model = {
        **small.model,
        "mixers": ["gated_delta_net"],
        "mixer_options": {"gated_delta_net": layers["gated_delta_net"]},
    }
    train(dataclasses.replace(small, model=model), tmp_path / "run", progress=False)
    assert not any(name.startswith("softmax") for line in read_metrics(tmp_path / "run/metrics.jsonl") for name in line)


def test_budget_loss_is_logged(small, tmp_path):
    train(with_options(small, budget=0.25), tmp_path / "run", progress=False)
    lines = [line for line in read_metrics(tmp_path / "run/metrics.jsonl") if "loss" in line]
    assert all(0 <= line["budget_loss"] < 1 for line in lines)


def test_importing_does_not_import_torch():
    code = (
        "import sys, tokenmix_nats_l, tokenmix_nats_l.cli; print([m for m in ('torch', 'triton') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_flags_shrink_every_recipe(name):
    check_shrinks(RECIPES[name]())
