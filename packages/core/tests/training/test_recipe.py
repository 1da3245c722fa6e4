import dataclasses
import json
from itertools import pairwise

import pytest
import yaml
from runs import recipe

from tokenmix_core.training.baselines import BASELINES, RECIPES, SIZES
from tokenmix_core.training.manifest import resumed
from tokenmix_core.training.overrides import overridden
from tokenmix_core.training.recipe import DataRecipe, OptimizerRecipe, Recipe, RunRecipe, Tokens


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_is_complete_and_comes_back_from_its_yaml(name, tmp_path):
    made = RECIPES[name]()
    assert made.name == name
    assert made.description
    config = made.model_config()
    assert config.max_position_embeddings >= made.data.seq_len
    for processes in (1, 4):
        rows, accumulation = made.optimizer.split(made.data.seq_len, processes)
        assert rows * accumulation * processes * made.data.seq_len == made.optimizer.batch_tokens
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(made.values()))
    assert overridden(made, config=path) == made


def test_recall_of_random_pairs_is_measured_only_where_it_was_trained():
    for name, make in RECIPES.items():
        made = make()
        assert ("mqar" in made.run.evaluations) <= ("mqar" in made.data.sources), name


def test_recipes_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        RECIPES["tiny"]().data.seq_len = 3


def test_flags_come_after_the_file_and_the_file_after_the_recipe(tmp_path):
    path = tmp_path / "mine.yaml"
    lines = [
        "learning_rate: 1e-3",
        "seq_len: 16",
        "sources: [a, b]",
        "torch_compile: true",
        "model:",
        "  norm_eps: 1e-5",
    ]
    path.write_text("\n".join(lines))
    flags = ["--seq-len", "64", "--model.hidden_size=64", "--weights", "0.5", "0.5", "--total_tokens", "1.5M"]
    made = overridden(recipe("c"), flags, path)
    assert (made.optimizer.learning_rate, made.data.seq_len, made.data.sources) == (1e-3, 64, ["a", "b"])
    assert made.run.torch_compile
    assert made.data.weights == [0.5, 0.5]
    assert made.optimizer.total_tokens == 1_500_000
    assert (made.model["norm_eps"], made.model["hidden_size"]) == (1e-5, 64)
    assert recipe("c").model["hidden_size"] == 32, "the recipe itself was changed"


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--learning_rat", "1"], "unknown field --learning_rat; the nearest is 'learning_rate'"),
        (["--learning-rte=1"], "the nearest is 'learning_rate'"),
        (["--model.hiden_size", "8"], "unknown field --model.hiden_size; the nearest is 'hidden_size'"),
        (["--modl.hidden_size", "8"], "unknown field --modl.hidden_size"),
        (["--model.hidden_size"], "needs a value"),
        (["--model.hidden_size", "x"], "hidden_size must be an integer, got 'x'"),
        (["--seq_len", "1.5"], "seq_len.*invalid int value: '1.5'"),
        (["--seq_len", "1"], "seq_len must be at least 2, got 1"),
        (["--seq_len"], "expected one argument"),
        (["--learning_rate", "-1"], "learning_rate must be at least 0"),
        (["--learning_rate", "nan"], "learning_rate must be a number, got nan"),
        (["--min_learning_rate", "1"], "min_learning_rate must be from 0 to 0.01"),
        (["--adam_beta2", "2"], "adam_beta2 must be from 0 to 1"),
        (["--documents", "apart"], "invalid choice: 'apart'"),
        (["--precision", "fp16"], "invalid choice: 'fp16'"),
        (["--total_tokens", "many"], "total_tokens.*'many'"),
        (["--total_tokens", "0"], "total_tokens must be at least 1"),
        (["--warmup_tokens", "1B"], "warmup_tokens must be below total_tokens"),
        (["--weights", "1", "2"], "weights must be positive, one for each"),
        (["--torch_compile", "perhaps"], "Truthy value expected"),
        (["--seed", "-1"], "seed must be from 0"),
        (["extra"], "unexpected argument 'extra'"),
    ],
)
def test_a_bad_flag_is_named(flags, told):
    with pytest.raises(ValueError, match=told):
        overridden(recipe("c"), flags)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("learning_rat: 1", "unknown field 'learning_rat' in .*; the nearest is 'learning_rate'"),
        ("model: {hiden_size: 3}", "the nearest is 'hidden_size'"),
        ("model: 3", "model must hold"),
        ("- 1", "must hold `field: value` lines, got list"),
        ("seq_len: {a: 1}", "seq_len must have one value"),
        ("seq_len:", "seq_len must have one value"),
        ("seq_len: many", "invalid int value"),
        ("a: [", "is not valid YAML"),
    ],
)
def test_a_bad_file_is_named(text, told, tmp_path):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=told):
        overridden(recipe("c"), config=path)


@pytest.mark.parametrize(
    ("flags", "text", "warmup", "said"),
    [
        (["--total_tokens", "100K"], None, 10_000, True),
        (["--total_tokens=100K", "--warmup-tokens", "4K"], None, 4000, False),
        (["--total_tokens", "4M"], None, None, False),
        ([], "total_tokens: 100K", 10_000, True),
        (["--total_tokens", "200K"], "warmup_tokens: 10K", 10_000, False),
        ([], None, None, False),
    ],
)
def test_a_shorter_run_keeps_the_share_of_its_warm_up_and_says_so(flags, text, warmup, said, tmp_path, capsys):
    path = tmp_path / "file.yaml"
    path.write_text(text or "{}")
    before = RECIPES["tiny"]().optimizer
    assert before.total_tokens == 10 * before.warmup_tokens
    made = overridden(RECIPES["tiny"](), flags, path)
    assert made.optimizer.warmup_tokens == (before.warmup_tokens if warmup is None else warmup)
    told = f"warmup_tokens is {made.optimizer.warmup_tokens:,} instead of {before.warmup_tokens:,}"
    assert (told in capsys.readouterr().err) == said


def test_a_warm_up_that_was_asked_for_is_not_changed():
    with pytest.raises(ValueError, match="warmup_tokens must be below total_tokens=100000, got 200000"):
        overridden(RECIPES["tiny"](), ["--total_tokens", "100K", "--warmup_tokens", "200K"])


def _manifest(folder, made, **changes):
    content = {"recipe": made.name, "values": made.values(), **changes}
    (folder / "run.json").write_text(json.dumps({k: v for k, v in content.items() if v is not None}))


def test_a_run_goes_on_with_the_fields_that_it_was_begun_with(tmp_path, capsys):
    plain = recipe("c")
    flags = [
        "--learning_rate",
        "5e-3",
        "--sources",
        "my corpus",
        "b",
        "--total_tokens",
        "600",
        "--sample_prompt",
        "x: ",
    ]
    begun = overridden(plain, [*flags, "--model.norm_eps", "1e-5", "--gradient_checkpointing", "true"])
    _manifest(tmp_path, begun)
    capsys.readouterr()
    assert resumed(plain, tmp_path) == begun
    assert capsys.readouterr().err == "", "the warm-up was scaled once more"
    # the same once more contradicts nothing, and how a run is carried out may change
    assert resumed(plain, tmp_path, ["--learning_rate=0.005", "--model.norm_eps=1e-5"]) == begun
    moved = resumed(plain, tmp_path, ["--sources", "elsewhere", "--save_steps", "7", "--micro_batch_tokens", "64"])
    assert (moved.data.sources, moved.run.save_steps, moved.optimizer.micro_batch_tokens) == (["elsewhere"], 7, 64)
    assert moved.optimizer.learning_rate == 5e-3


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--learning_rate", "2e-2"], r"cannot continue with other fields \(learning_rate was 0.01 and is 0.02\)"),
        (["--seed", "5"], "seed was 0 and is 5"),
        (["--model.hidden_size", "64"], "model was .*'hidden_size': 32.* and is .*'hidden_size': 64"),
        (["--total_tokens", "4K"], "total_tokens was 1024 and is 4000"),
        (["--precision", "bf16"], "precision was 'fp32' and is 'bf16'"),
    ],
)
def test_flags_that_contradict_the_run_are_refused(flags, told, tmp_path):
    _manifest(tmp_path, recipe("c"))
    with pytest.raises(ValueError, match=told):
        resumed(recipe("c"), tmp_path, flags)


def test_without_a_manifest_only_flags_are_known(tmp_path):
    assert resumed(recipe("c"), tmp_path, ["--seed", "5"]).run.seed == 5


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"none.yaml cannot be read: No such file"):
        overridden(recipe("c"), config=tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("text", "number"), [("15B", 15 * 10**9), ("0.5M", 500_000), ("2**19", 2**19), ("1e6", 10**6), ("1_000", 1000)]
)
def test_tokens_are_counted_as_people_write_them(text, number):
    assert Tokens(text) == number


@pytest.mark.parametrize("text", ["", "B", "1.5", "0.0000001M", "inf", "2**x", "five"])
def test_other_text_is_no_number_of_tokens(text):
    with pytest.raises(ValueError, match="expected a number of tokens"):
        Tokens(text)


def test_the_learning_rate_rises_to_its_peak_and_falls_to_its_floor():
    schedule = OptimizerRecipe(
        total_tokens=Tokens(1000),
        warmup_tokens=Tokens(100),
        batch_tokens=Tokens(10),
        micro_batch_tokens=Tokens(10),
        learning_rate=1e-3,
        initial_learning_rate=1e-4,
        min_learning_rate=2e-4,
    )
    rates = [1e-3 * schedule.learning_rate_factor(step) for step in range(schedule.steps + 5)]
    assert schedule.steps == 100
    assert rates[10] == pytest.approx(1e-3) == max(rates)
    assert all(b > a for a, b in pairwise(rates[:11]))
    assert rates[0] > 1e-4
    assert rates[1] - rates[0] == pytest.approx(9e-4 / 11)
    assert all(b < a for a, b in pairwise(rates[10:100]))
    assert rates[99] == pytest.approx(2e-4)
    assert rates[100:] == pytest.approx([2e-4] * 5)
    # half a cosine: the middle of the fall is the middle of the rates
    assert rates[54] + rates[55] == pytest.approx(1e-3 + 2e-4)


def test_a_step_is_split_over_processes_without_changing_its_tokens():
    optimizer = OptimizerRecipe(batch_tokens=Tokens(2**16), micro_batch_tokens=Tokens(2**14))
    assert optimizer.split(4096, 1) == (4, 4)
    assert optimizer.split(4096, 2) == (4, 2)
    assert optimizer.split(4096, 8) == (2, 1)
    assert optimizer.split(4096, 16) == (1, 1)
    with pytest.raises(ValueError, match=r"multiple of seq_len times the number of processes, 4096 × 3"):
        optimizer.split(4096, 3)
    with pytest.raises(ValueError, match=r"4096 × 32"):
        optimizer.split(4096, 32)


@pytest.mark.parametrize(
    ("group", "changes", "told"),
    [
        (DataRecipe, {"sources": []}, "sources must name at least one"),
        (DataRecipe, {"documents": "x"}, "documents must be one of 'separate', 'joined', got 'x'"),
        (RunRecipe, {"precision": "x"}, "precision must be"),
        (RunRecipe, {"logging_steps": 0}, "logging_steps must be at least 1"),
        (RunRecipe, {"save_total_limit": True}, "save_total_limit must be an integer, got True"),
    ],
)
def test_bad_fields_are_refused_in_python_too(group, changes, told):
    with pytest.raises(ValueError, match=told):
        group(**changes)


def test_baselines_of_a_size_differ_in_nothing_but_the_model():
    for size in SIZES:
        recipes = [RECIPES[f"{kind}-{size}"]() for kind in BASELINES]
        assert len({(r.data.seq_len, r.data.tokenizer, r.optimizer, r.run.precision, r.run.seed) for r in recipes}) == 1
    optimizer = RECIPES["mamba2-1.4b"]().optimizer
    assert (optimizer.learning_rate, optimizer.warmup_tokens, optimizer.batch_tokens) == (1e-3, 10e9, 2**20)


@pytest.mark.parametrize(
    ("flags", "changed"),
    [
        (["--model.mixer_options.attention.num_heads", "2"], {"num_heads": 2}),
        ([f"--model.mixer_options.attention.{x}" for x in ("window=8", "sinks=1")], {"window": 8, "sinks": 1}),
    ],
)
def test_one_option_of_a_mixer_is_set_and_the_others_stay(flags, changed):
    recipe = RECIPES["tiny"]()
    options = recipe.model["mixer_options"]
    assert overridden(recipe, flags).model == {
        **recipe.model,
        "mixer_options": {**options, "attention": {**options["attention"], **changed}},
    }
    assert recipe.model["mixer_options"] == RECIPES["tiny"]().model["mixer_options"]


@pytest.mark.parametrize(
    ("flag", "told"),
    [
        ("--model.mixer_options.attention.heads=2", "unknown option 'heads'; Attention has num_heads"),
        ("--model.mixer_options.mamba2.head_dim=16", "no layer has the label 'mamba2'"),
        ("--model.hidden_size.x=2", "there is no 'x' inside 128"),
        ("--model.mixer_option.attention.num_heads=2", "the nearest is 'mixer_options'"),
    ],
)
def test_an_option_that_is_none_is_told(flag, told):
    with pytest.raises(ValueError, match=told):
        overridden(RECIPES["tiny"](), [flag])


def test_a_smaller_depth_or_width_gets_labels_and_heads_that_fit(capsys):
    options = {"gated_delta_net": {"num_heads": 2, "head_dim": 8}, "attention": {"num_heads": 24, "num_kv_heads": 6}}
    sizes = {"vocab_size": 64, "hidden_size": 768, "intermediate_size": 64, "num_hidden_layers": 7}
    wide = Recipe(
        "c",
        "",
        {
            **sizes,
            "mixers": ["gated_delta_net"] * 3 + ["attention"] + ["gated_delta_net"] * 3,
            "mixer_options": options,
        },
    )
    small = overridden(wide, ["--model.num_hidden_layers", "2", "--model.hidden_size=64"]).model
    assert small["mixers"] == ["gated_delta_net", "attention"]
    assert small["mixer_options"]["attention"] == {"num_heads": 8, "num_kv_heads": 2}
    assert "--model.mixer_options.attention.num_heads sets another" in capsys.readouterr().err
    assert overridden(wide, ["--model.num_hidden_layers=1"]).model["mixers"] == ["gated_delta_net"]
    assert overridden(wide, ["--model.num_hidden_layers=8"]).model["mixers"] == [
        *wide.model["mixers"],
        "gated_delta_net",
    ]
    # a value that a flag sets is not adapted
    with pytest.raises(ValueError, match="num_heads must divide hidden_size"):
        overridden(wide, ["--model.hidden_size=64", "--model.mixer_options.attention.num_heads=24"])
    with pytest.raises(ValueError, match="expected a label for each"):
        overridden(
            wide, ["--model.num_hidden_layers=2", "--model.mixers=[gated_delta_net, attention, gated_delta_net]"]
        )
