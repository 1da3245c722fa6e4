"""Recipes: sizes as in the paper's comparisons, and resumed runs with the windows of an uninterrupted run."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, TrainerCallback

from support.recipes import check_shrinks
from tokenmix_core.training.callbacks import read_metrics
from tokenmix_core.training.overrides import overridden
from tokenmix_core.training.recipe import DataRecipe, OptimizerRecipe, RunRecipe, Tokens
from tokenmix_core.training.trainer import METRICS, train
from tokenmix_nha.model_windows import windows_of
from tokenmix_nha.recipes import ABLATIONS, BASELINES, RECIPES, drawn, tiny
from tokenmix_nha.windows import nha_layers


def parameters(name: str) -> int:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(RECIPES[name]().model_config()).num_parameters()


@pytest.mark.parametrize("name", list(RECIPES))
def test_every_recipe_is_complete(name):
    recipe = RECIPES[name]()
    assert recipe.name == name
    recipe.model_config()
    recipe.optimizer.split(recipe.data.seq_len, 1)
    again = overridden(recipe, ["--seed", "7"])
    assert again.run.seed == 7
    assert again.values() == {**recipe.values(), "seed": 7}


@pytest.mark.parametrize("size", ["340m", "1.3b"])
def test_models_of_a_size_have_equally_many_parameters(size):
    transformer = parameters(f"transformer-{size}")
    assert abs(transformer / (341e6 if size == "340m" else 1.3e9) - 1) < 0.06
    for kind in (f"nha-{size}", *(f"{kind}-{size}" for kind in (*BASELINES, "gsa", "gsa-hybrid"))):
        assert abs(parameters(kind) / transformer - 1) < 0.025, kind


@pytest.mark.parametrize(("size", "stated"), [("340m", 340e6), ("1.3b", 1300e6)])
@pytest.mark.parametrize("kind", ["transformer", "gdn", "gdn-hybrid", "mamba2-hybrid"])
def test_baselines_have_what_table_1_states(kind, size, stated):
    assert abs(parameters(f"{kind}-{size}") - stated) <= 0.01 * stated


@pytest.mark.parametrize(("size", "number"), [("100m", 86.5e6), ("small", 279e3)])
def test_recall_models_of_a_size_have_about_as_many_parameters(size, number):
    for name in RECIPES:
        # learned positions add tables with a row for each position
        if name.startswith("recall-") and f"-{size}" in name and "learned-positions" not in name:
            assert abs(parameters(name) / number - 1) < 0.075, name


def test_slots_have_as_many_elements_as_gdn_s_state_without_the_window():
    for size, names in (("100m", ("nha-pure", "gsa", "gdn")), ("small", ("nha", "nha-no-window", "gdn"))):
        held = set()
        for name in names:
            config = RECIPES[f"recall-{name}-{size}"]().model_config()
            if name == "gdn":
                options = config.mixer_options["gated_delta_net"]
                held.add(options["num_heads"] * options["head_dim"] ** 2 * options["expand_v"])
            else:
                options = config.options_of(0)
                held.add(options["num_heads"] * options["slots"] * 2 * 128)
        assert len(held) == 1, (size, held)
    bytes_of = {}
    for name in ("nha", "nha-no-window"):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(RECIPES[f"recall-{name}-small"]().model_config())
        bytes_of[name] = model.state_bytes(256, 1, torch.float32)
    assert bytes_of["nha"] / bytes_of["nha-no-window"] == pytest.approx(1.875, abs=1e-3)


@pytest.mark.parametrize("size", ["340m", "100m", "small"])
def test_a_description_states_the_difference_from_nha_s_parameter_count(size):
    own = "nha-340m" if size == "340m" else f"recall-nha-{size}"
    others = [f"nha-340m-{name}" if size == "340m" else f"recall-nha-{name}-{size}" for name in ABLATIONS]
    if size == "small":
        others += ["recall-gdn-small", "recall-transformer-small"]
    for recipe in others:
        share = parameters(recipe) / parameters(own) - 1
        said = RECIPES[recipe]().description
        if abs(share) < 0.005:
            assert "parameters" not in said, recipe
        else:
            assert f"{abs(share):.1%} {'more' if share > 0 else 'fewer'} parameters than NHA" in said, recipe


def windows(config):
    return [config.options_of(i)["window"] for i in range(config.num_hidden_layers)]


def test_full_layers_have_the_paper_s_indices():
    assert [i for i, w in enumerate(windows(RECIPES["nha-340m"]().model_config())) if w == "full"] == [6, 14, 22]
    assert [i for i, w in enumerate(windows(RECIPES["nha-1.3b"]().model_config())) if w == "full"] == [0, 8, 16]
    assert set(windows(RECIPES["gsa-340m"]().model_config())) == {0}
    for kind in ("gsa", "gla", "gdn", "mamba2"):
        config = RECIPES[f"{kind}-hybrid-1.3b"]().model_config()
        layers = windows(config) if kind == "gsa" else config.mixers
        assert [i for i, layer in enumerate(layers) if layer in ("full", "attention")] == [0, 8, 16]


def test_training_settings_equal_the_paper_s():
    recipe = RECIPES["nha-340m"]()
    optimizer = recipe.optimizer
    assert (optimizer.learning_rate, optimizer.weight_decay, optimizer.max_grad_norm) == (3e-4, 0.01, 1.0)
    assert (recipe.run.seed, recipe.data.seq_len, optimizer.total_tokens) == (42, 2048, 15 * 10**9)
    assert recipe.data.sources == ["data/slimpajama-transformer-1.3B-100B"]
    options = recipe.model_config().options_of(0)
    assert (options["slots"], options["window"], options["num_heads"]) == (64, 32, 8)


@pytest.mark.parametrize("name", list(ABLATIONS))
def test_an_ablation_s_recipe_changes_only_the_named_options(name):
    paper, ablated = RECIPES["nha-340m"]().model_config(), RECIPES[f"nha-340m-{name}"]().model_config()
    fields = {key for key, value in paper.to_dict().items() if ablated.to_dict()[key] != value}
    assert fields <= {"mixers", "mixer_options"}
    for layer, window in enumerate(windows(paper)):
        expected = {**paper.options_of(layer), **ABLATIONS[name]}
        if window == "full":
            expected["window"] = "full"
        assert ablated.options_of(layer) == expected
    assert fields


class StopAt(TrainerCallback):
    """End a run after a step, with a checkpoint."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **_):
        if state.global_step == self.step:
            control.should_save = control.should_training_stop = True


def nano():
    recipe = tiny()
    return replace(
        recipe,
        model={
            **recipe.model,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "intermediate_size": 48,
            **nha_layers([4, "full"], num_heads=2, slots=16),
        },
        data=DataRecipe(sources=["mqar"], seq_len=32, mqar_vocab_size=200, documents="joined"),
        optimizer=OptimizerRecipe(
            total_tokens=Tokens(128 * 6), batch_tokens=Tokens(128), micro_batch_tokens=Tokens(64), learning_rate=1e-2
        ),
        run=RunRecipe(logging_steps=1, save_steps=100),
    )


def losses(folder):
    return [line["loss"] for line in read_metrics(folder / METRICS) if "loss" in line]


def test_a_resumed_run_draws_the_windows_of_an_uninterrupted_run(tmp_path):
    recipe = drawn(nano(), [0, 4, "full"])
    train(recipe, tmp_path / "whole", progress=False)
    stopped = replace(recipe, callbacks=(*recipe.callbacks, lambda _: StopAt(3)))
    assert train(stopped, tmp_path / "parts", progress=False).interrupted
    train(recipe, tmp_path / "parts", resume=True, progress=False)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert len(losses(tmp_path / "whole")) == 6
    # the loss depends on the drawn windows, but the saved model has the configuration's windows
    train(replace(recipe, callbacks=()), tmp_path / "fixed", progress=False)
    assert losses(tmp_path / "fixed") != losses(tmp_path / "whole")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "parts")
    assert windows_of(model) == windows(model.config) == [4, "full"]
    assert model.config.random_windows == [0, 4, "full"]


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_flags_shrink_every_recipe(name):
    check_shrinks(RECIPES[name]())
