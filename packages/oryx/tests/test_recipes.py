"""Test recipes: the paper's sizes and settings, and modes of training rows, which no interruption or split changes."""

import dataclasses
import shutil
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

import tokenmix_core
import tokenmix_oryx
from support.corpora import documents, token_file
from support.recipes import check_shrinks
from tokenmix_core.data.tokenizer import byte_tokenizer
from tokenmix_core.training.callbacks import read_metrics
from tokenmix_core.training.manifest import run_manifest
from tokenmix_core.training.overrides import overridden
from tokenmix_core.training.recipe import Tokens
from tokenmix_core.training.trainer import build_trainer, train, training_rows
from tokenmix_oryx.mixer import OryxMixer
from tokenmix_oryx.recipes import ABLATIONS, FAMILIES, RECIPES, WIDTHS

NAMED = {"130m": 130e6, "380m": 380e6, "810m": 810e6, "1.4b": 1.4e9}
# parameters that tokens in attention mode do not use, and parameters that tokens in linear mode do not use
LINEAR_OWN = ("linear_q_proj", "dt_proj", "beta_proj", "A_log", "dt_bias", "mixer.D")
ATTENTION_OWN = ("attention_q_proj",)


def counted(name):
    config = RECIPES[name]().model_config()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return config, {n: p.numel() for n, p in model.named_parameters()}


def _layer(config):
    with torch.device("meta"):
        return OryxMixer.from_config(config, 0, **config.options_of(0))


def own(sizes, names):
    return sum(size for n, size in sizes.items() if any(part in n for part in names))


@pytest.mark.parametrize("size", WIDTHS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_mode_uses_the_papers_parameter_count(family, size):
    _, sizes = counted(f"{family}-{size}")
    baselines = [sum(counted(f"{kind}-{size}")[1].values()) for kind in ("transformer", "mamba2", "gated_delta_net")]
    for other in (LINEAR_OWN, ATTENTION_OWN):
        used = sum(sizes.values()) - own(sizes, other)
        assert used == pytest.approx(NAMED[size], rel=0.01)
        for baseline in baselines:
            assert used == pytest.approx(baseline, rel=0.01)


@pytest.mark.parametrize("size", WIDTHS)
@pytest.mark.parametrize("family", FAMILIES)
def test_more_than_nine_tenths_of_weights_are_shared(family, size):
    _, sizes = counted(f"{family}-{size}")
    sizes = {n: s for n, s in sizes.items() if "embed_tokens" not in n}
    total = sum(sizes.values())
    shared = total - own(sizes, LINEAR_OWN) - own(sizes, ATTENTION_OWN)
    for other in (LINEAR_OWN, ATTENTION_OWN):
        assert shared / (total - own(sizes, other)) > 0.9


@pytest.mark.parametrize("size", WIDTHS)
@pytest.mark.parametrize("family", FAMILIES)
def test_settings_equal_appendix_d(family, size):
    # GPT-3's peak learning rates at 125M, 350M, 760M and 1.3B
    gpt3 = {"130m": 6e-4, "380m": 3e-4, "810m": 2.5e-4, "1.4b": 2e-4}[size]
    recipe, baseline = RECIPES[f"{family}-{size}"](), RECIPES[f"transformer-{size}"]()
    optimizer = recipe.optimizer
    assert optimizer.learning_rate == pytest.approx(10 * gpt3)
    assert baseline.optimizer.learning_rate == pytest.approx(5 * gpt3)
    assert (optimizer.adam_beta1, optimizer.adam_beta2, optimizer.weight_decay) == (0.9, 0.95, 0.1)
    assert optimizer.total_tokens == 100e9
    assert optimizer.warmup_tokens == optimizer.total_tokens / 10
    assert optimizer.batch_tokens == (2**20 if size == "1.4b" else 2**19)
    assert recipe.data.seq_len == 2048
    assert recipe.data.tokenizer == "gpt2"
    assert "fineweb-edu" in recipe.data.sources[0]
    assert recipe.run.precision == "bf16"
    config = recipe.model_config()
    assert _layer(config).head_dim == 128
    assert (config.mode_chunk_size, config.attention_probability, config.mode_assignment) == (128, 0.25, "chunk")
    assert dataclasses.replace(recipe.data) == baseline.data


def test_baseline_state_sizes_equal_section_4():
    states = {}
    for kind in ("tm-1.4b", "mamba2-1.4b", "gated_delta_net-1.4b"):
        with torch.device("meta"):
            mixers = AutoModelForCausalLM.from_config(RECIPES[kind]().model_config()).model.mixers
        states[kind] = sum(m.make_state().recurrent.bounds(1, 1, torch.bfloat16).most for m in mixers)
    oryx, mamba2, delta = states.values()
    assert (mamba2, delta) == (2 * oryx, 1.5 * oryx)


def test_every_recipe_has_its_name_and_a_model():
    for name, make in RECIPES.items():
        recipe = make()
        assert recipe.name == name
        assert recipe.model_config().model_type == recipe.model_type


@pytest.mark.parametrize("family", FAMILIES)
def test_ablations_are_matched_in_parameters(family):
    _, final = counted(f"{family}-380m")
    used = sum(final.values()) - own(final, ATTENTION_OWN)
    for name, changes in ABLATIONS[family].items():
        config, sizes = counted(f"{family}-380m-{name}")
        # a shared query projection has the name of attention's, but both modes use it
        options = config.options_of(0)
        mine = sum(sizes.values()) - (0 if options.get("shared_query") else own(sizes, ATTENTION_OWN))
        assert mine == pytest.approx(used, rel=0.01), name
        assignment = {"mode_assignment": changes.get("mode_assignment", "sequence")}
        assert options | assignment == {"linear_mixer": FAMILIES[family], **assignment, **changes}
        assert config.mode_assignment == assignment["mode_assignment"]


def test_ablations_start_from_their_tables_base():
    """Models of Table 4 (left) and Table 6 have no gate, models of Table 7 RoPE in both mixers.

    Convolutions are absent in Table 4 (left), and in Table 6 if the name says so.
    """
    for name in ("shared-query", "grouped-norm", "shared-query-grouped-norm", "no-conv-rope-attention"):
        for config in (RECIPES[f"tm-380m-{n}"]().model_config() for n in ("no-conv-no-gate", name)):
            assert (_layer(config).k_conv, _layer(config).g_proj) == (None, None)
            assert config.intermediate_size == 3 * 1024
    for config in (RECIPES[f"tm-380m-{n}"]().model_config() for n in ("no-gate", "rope-attention")):
        assert _layer(config).k_conv.weight.shape[-1] == 4
        assert _layer(config).g_proj is None
    for name in ("l2-key", "l2-query-key"):
        assert _layer(RECIPES[f"tg-380m-{name}"]().model_config()).rope_both


# counts of all parameters; "shared-query" lacks one query projection per layer, but one mode uses as many parameters
COUNTS = {
    "tm-380m-sequence": 405_826_112,
    "tm-380m-chunk": 405_826_112,
    "tm-380m-no-conv": 405_629_504,
    "tm-380m-no-gate": 404_253_248,
    "tm-380m-rope-attention": 404_253_248,
    "tm-380m-no-conv-no-gate": 404_056_640,
    "tm-380m-grouped-norm": 404_056_640,
    "tm-380m-no-conv-rope-attention": 404_056_640,
    "tm-380m-shared-query": 404_056_640 - 24 * 1024**2,
    "tm-380m-shared-query-grouped-norm": 404_056_640 - 24 * 1024**2,
    **{f"tg-380m-{name}": 406_022_528 for name in ABLATIONS["tg"]},
    "transformer-1.4b": 1_411_649_536,
    "transformer-1.4b-norm": 1_411_649_536 + 24 * 2048,
    "transformer-1.4b-norm-conv-gate": 1_408_946_176,
}


@pytest.mark.parametrize("name", COUNTS)
def test_parameter_counts_of_ablations(name):
    assert sum(counted(name)[1].values()) == COUNTS[name]


def test_components_of_table_5_are_added_to_the_baseline_and_nothing_else():
    base = RECIPES["transformer-1.4b"]()
    for name, parts in (("norm", (0, False)), ("norm-conv-gate", (4, True))):
        recipe = RECIPES[f"transformer-1.4b-{name}"]()
        assert (recipe.data, recipe.optimizer, recipe.run) == (base.data, base.optimizer, base.run)
        with torch.device("meta"):
            mixers = AutoModelForCausalLM.from_config(recipe.model_config()).model.mixers
        assert len(mixers) == 24
        for mixer in mixers:
            conv = 0 if mixer.k_conv is None else mixer.k_conv.weight.shape[-1]
            assert (conv, mixer.g_proj is not None) == parts
            assert (mixer.num_heads, mixer.head_dim) == (16, 128)
        assert abs(COUNTS[f"transformer-1.4b-{name}"] / COUNTS["transformer-1.4b"] - 1) < 0.002


@pytest.mark.parametrize("size", WIDTHS)
def test_figures_4_and_5_have_both_assignments_at_every_size(size):
    final = RECIPES[f"tm-{size}"]()
    for assignment in ("sequence", "chunk"):
        recipe = RECIPES[f"tm-{size}-{assignment}"]()
        assert recipe.model_config().mode_assignment == assignment
        assert recipe.optimizer.total_tokens == 20 * NAMED[size]
        assert recipe.optimizer.warmup_tokens * 10 == recipe.optimizer.total_tokens
        assert recipe.optimizer.learning_rate == final.optimizer.learning_rate
        assert {**recipe.model, "mode_assignment": "chunk"} == {**final.model, "mode_assignment": "chunk"}


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    tokens = token_file(tmp_path_factory.mktemp("corpus"), documents(30))
    flags = "--seq_len 64 --batch_tokens 256 --micro_batch_tokens 256 --total_tokens 1536 --warmup_tokens 256"
    flags += " --logging_steps 1 --save_steps 3 --save_total_limit 2 --model.mode_chunk_size 16"
    flags += " --model.hidden_size 32 --model.mixer_options.oryx.head_dim 16"
    flags += " --model.num_hidden_layers 2 --model.intermediate_size 32"
    return overridden(RECIPES["tiny"](), [*flags.split(), "--sources", str(tokens)])


@pytest.mark.parametrize("documents", ["joined", "separate"])
def test_rows_include_their_modes(small, documents):
    from tokenmix_core.training.data import collate_joined, collate_separate

    recipe = dataclasses.replace(small, data=dataclasses.replace(small.data, documents=documents))
    rows, _ = training_rows(recipe, byte_tokenizer())
    again, _ = training_rows(recipe, byte_tokenizer())
    drawn = torch.stack([rows[i]["inputs"]["mode"] for i in range(24)])
    assert torch.equal(torch.stack([again[i]["inputs"]["mode"] for i in reversed(range(24))]).flip(0), drawn)
    assert len({tuple(row.tolist()) for row in drawn}) > 8
    batch = (collate_joined if documents == "joined" else collate_separate)([rows[i] for i in range(4)])
    assert torch.equal(batch["mode"], drawn[:4] if documents == "joined" else drawn[:4].view(1, -1))


@pytest.mark.parametrize("assignment", ["chunk", "sequence"])
def test_mode_assignment_follows_the_recipe(small, assignment):
    recipe = dataclasses.replace(small, model={**small.model, "mode_assignment": assignment})
    rows, _ = training_rows(recipe, byte_tokenizer())
    drawn = torch.stack([rows[i]["inputs"]["mode"] for i in range(24)])
    assert bool((drawn.all(1) == drawn.any(1)).all()) is (assignment == "sequence")


def test_run_manifest_names_the_versions_of_core_and_this_package(small, tmp_path):
    versions = run_manifest(small, build_trainer(small, tmp_path, progress=False))["versions"]
    expected = {"tokenmix_core": tokenmix_core.__version__, "tokenmix_oryx": tokenmix_oryx.__version__}
    assert expected.items() <= versions.items()


def test_resumed_run_continues_with_the_same_modes(small, tmp_path):
    whole = train(small, tmp_path / "whole", progress=False)
    assert whole.step == 6
    # simulate a run that was killed after its third step
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    shutil.rmtree(tmp_path / "cut" / "checkpoint-6")
    train(small, tmp_path / "cut", resume=True, progress=False)
    curves = [
        {line["step"]: line["loss"] for line in read_metrics(tmp_path / run / "metrics.jsonl") if "loss" in line}
        for run in ("whole", "cut")
    ]
    assert curves[0] == curves[1]


def test_micro_batches_do_not_change_results(small, tmp_path):
    """A step has the same rows and modes, into however many micro-batches (or processes) it is divided."""
    losses = []
    for micro in (256, 64):
        recipe = dataclasses.replace(
            small, optimizer=dataclasses.replace(small.optimizer, micro_batch_tokens=Tokens(micro))
        )
        losses.append(train(recipe, tmp_path / str(micro), progress=False).loss)
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_importing_does_not_import_torch():
    code = "import sys, tokenmix_oryx, tokenmix_oryx.cli; print([m for m in ('torch', 'triton') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_flags_shrink_every_recipe(name):
    check_shrinks(RECIPES[name]())
