"""The model with all options: decoding, saving and training; setting and drawing windows."""

import json
from typing import ClassVar

import pytest
import torch
from transformers import AutoModelForCausalLM, TrainerState

import tokenmix_nha
from support.exporting import check_exports
from tokenmix_core.testing.closeness import relative_error
from tokenmix_core.testing.models import ModelContract
from tokenmix_nha.config import NhaConfig
from tokenmix_nha.model import NhaForCausalLM, NhaModel
from tokenmix_nha.model_windows import set_windows, using_windows, windows_of
from tokenmix_nha.training import DrawWindows, draw_windows
from tokenmix_nha.windows import check_windows, hybrid_windows, layers_with_windows, nha_layers

FIELDS = {
    "vocab_size": 61,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "intermediate_size": 32,
    "initializer_range": 0.2,
    "pad_token_id": 0,
}
LAYER = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "slots": 5, "gate_normalizer": 2.0}


def fields(windows, **options):
    return FIELDS | nha_layers(windows, **LAYER | options)


class _Contract(ModelContract):
    config_class = NhaConfig
    model_class = NhaModel
    causal_lm_class = NhaForCausalLM


class TestHybrid(_Contract):
    configs: ClassVar = {
        "windows": fields([4, 7]),
        "slots alone": fields(0),
        "without slots": fields([3, "full"], slots=0),
    }
    traced: ClassVar = {"window and slots": fields([4, "full"], head_dim=64, slots=16)}


@pytest.mark.parametrize("windows", [[4, 7], [4, "full"]], ids=["windows", "full"])
def test_one_exported_program_takes_any_length(windows):
    torch.manual_seed(0)
    check_exports(NhaForCausalLM(NhaConfig(**fields(windows))))


class TestWithAFullLayer(_Contract):
    configs: ClassVar = {
        "hybrid": fields([5, "full"]),
        "apart": fields([5, "full"], fusion="fixed"),
    }

    def test_training_reaches_every_parameter_with_and_without_checkpointing(self, model, ids):
        # the gates of a full layer are unused: their gradient is zero
        model.model.layers[1].mixer.f_proj.requires_grad_(False)
        gates = model.model.layers[1].mixer.f_proj.weight
        model.train()
        for checkpointing in (False, True):
            if checkpointing:
                model.gradient_checkpointing_enable()
            model.zero_grad()
            model(ids, labels=ids).loss.backward()
            for name, p in model.named_parameters():
                assert p is gates or p.grad.any(), name


class TestAblated(_Contract):
    configs: ClassVar = {
        "no shift": fields(4, token_shift=False),
        "learned sum": fields(4, fusion="learned"),
        "learned positions": fields(4, positions="learned") | {"max_position_embeddings": 64},
    }


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return NhaForCausalLM(NhaConfig(**fields([4, "full"]))).eval()


@pytest.fixture
def ids():
    return torch.randint(1, 61, (2, 19), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def test_set_windows_gives_the_same_logits_as_windows_of_the_configuration(model, ids):
    for windows in (0, "full", [3, 0], ["full", 6]):
        other = NhaForCausalLM(NhaConfig(**fields(windows))).eval()
        other.load_state_dict(model.state_dict())
        before = model(ids).logits
        with using_windows(model, windows):
            assert torch.equal(model(ids).logits, other(ids).logits)
            assert model.state_bytes(1000) == other.state_bytes(1000)
            steps, cache = [], model.make_cache()
            steps = [model(token, past_key_values=cache).logits for token in ids.split(1, 1)]
            assert relative_error(torch.cat(steps, 1), other(ids).logits) < 1e-5
        assert torch.equal(model(ids).logits, before)
        assert windows_of(model) == [4, "full"]


def test_importing_a_module_does_not_replace_a_public_name():
    for name in tokenmix_nha.__all__:
        first = getattr(tokenmix_nha, name)
        assert callable(first), name
        assert getattr(tokenmix_nha, name) is first, name


def test_invalid_windows_are_refused(model):
    for windows, message in (
        ([1, 2, 3], "expected one for each of the 2"),
        (-1, "a window must"),
        ([], "got 0"),
        (2.5, "a window must"),
    ):
        with pytest.raises(ValueError, match=message):
            set_windows(model, windows)
    with pytest.raises(ValueError, match="no layer"):
        set_windows(torch.nn.Linear(1, 1), 3)
    with pytest.raises(ValueError, match="full layers must lie"):
        hybrid_windows(4, 32, [4])
    assert hybrid_windows(4, 32, [2]) == [32, 32, "full", 32]
    assert check_windows([0, "full"], 4) == [0, "full", 0, "full"]


def test_drawn_windows_depend_on_the_step_and_the_seed_alone(model):
    choices = [0, 8, "full"]
    draws = [draw_windows(choices, 24, seed=1, step=step) for step in range(40)]
    assert draws == [draw_windows(choices, 24, seed=1, step=step) for step in range(40)]
    assert draws != [draw_windows(choices, 24, seed=2, step=step) for step in range(40)]
    everything = [window for draw in draws for window in draw]
    for window in choices:
        assert abs(everything.count(window) / len(everything) - 1 / 3) < 0.05
    callback, state = DrawWindows(choices, seed=1), TrainerState()
    for step in (0, 1, 7):
        state.global_step = step
        callback.on_step_begin(None, state, None, model=model)
        assert windows_of(model) == draw_windows(choices, 2, seed=1, step=step)
    callback.on_train_end(None, state, None, model=model)
    assert windows_of(model) == [4, "full"]


def test_the_state_of_a_model_without_full_layers_has_constant_size(model):
    with using_windows(model, [4, 0]):
        assert model.state_bytes(100) == model.state_bytes(10**6)
    assert model.state_bytes(100) < model.state_bytes(200)


def test_layers_with_windows_changes_only_windows():
    config = NhaConfig(**fields([4, "full"]), random_windows=[4, "full"])
    assert NhaConfig.from_dict(config.to_dict()).to_dict() == config.to_dict()
    for windows in ([4, "full"], ["full", 4], [0, 0], [7, 4]):
        changed = NhaConfig.from_dict(config.to_dict() | layers_with_windows(config, windows))
        assert [changed.options_of(i) for i in range(2)] == [{**LAYER, "window": window} for window in windows]
        assert {**changed.to_dict(), **{name: config.to_dict()[name] for name in ("mixers", "mixer_options")}} == {
            **config.to_dict()
        }
    # labels that differ in more than the window stay distinct, and other mixers stay unchanged
    options = {"a": {"type": "nha", "slots": 3, "window": 4}, "a-8": {"type": "nha", "window": 8}}
    config = NhaConfig(hidden_size=64, num_hidden_layers=3, mixers=["a", "attention", "a-8"], mixer_options=options)
    changed = NhaConfig.from_dict(config.to_dict() | layers_with_windows(config, [8, 9]))
    slots_and_windows = [tuple(changed.options_of(i).get(name) for name in ("slots", "window")) for i in range(3)]
    assert slots_and_windows == [(3, 8), (None, None), (None, 9)]


OLD = {
    "all": {"window": [4, "full"], **LAYER},
    "one window": {
        "window": 4,
        "slots": 3,
        "num_heads": 4,
        "mixer_options": {"nha": {"qk_norm": True}},
    },
    "the default window": {"num_heads": 4},
}


@pytest.mark.parametrize("form", list(OLD))
def test_an_older_checkpoint_with_options_as_fields_loads(form, ids, tmp_path):
    windows, old = OLD[form].get("window", 32), dict(OLD[form])
    options = {name: x for name, x in old.items() if name not in ("window", "mixers", "mixer_options")}
    options |= old.get("mixer_options", {}).get("nha", {})
    model = NhaForCausalLM(NhaConfig(**FIELDS, **nha_layers(windows, **options))).eval()
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps({n: x for n, x in content.items() if not n.startswith("mixer")} | old))
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert {**again.config.to_dict(), "_name_or_path": ""} == {**model.config.to_dict(), "_name_or_path": ""}
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)


def test_a_former_field_is_refused_and_the_message_names_mixer_options():
    with pytest.raises(ValueError, match=r"unknown key 'slots'.*options of a layer belong in mixer_options"):
        NhaConfig(**FIELDS, slots=3)


@pytest.mark.parametrize(
    ("windows", "options", "message"),
    [([], {}, "random_windows"), ([4, -4], {}, "a window must be"), ([0, 4], {"slots": 0}, "needs slots")],
)
def test_windows_that_cannot_be_drawn_are_refused(windows, options, message):
    with pytest.raises(ValueError, match=message):
        NhaConfig(**fields(4, **options), random_windows=windows)


@pytest.mark.parametrize(
    "form",
    [
        {"windows": [4, "full"]},
        {"windows": 0},
        {"positions": "both"},
        {"positions": "learned"},
        {"fusion": "learned"},
        {"token_shift": False},
        {"slots": 0},
        {"qk_norm": True},
    ],
    ids=str,
)
def test_training_works_under_autocast_with_all_options(form):
    torch.manual_seed(0)
    model = NhaForCausalLM(NhaConfig(**fields(**{"windows": 4} | form), max_position_embeddings=64)).train()
    ids = torch.randint(3, 61, (1, 40))
    boundaries = torch.tensor([0, 3, 20, 40], dtype=torch.int32)
    losses = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            losses.append(model(ids, labels=ids, cu_seqlens=boundaries).loss)
        losses[-1].backward()
    assert abs(losses[1] / losses[0] - 1) < 2e-2


@torch.no_grad()
def test_padding_compiles_into_one_graph(model, ids):
    mask = torch.ones_like(ids)
    mask[-1, : ids.shape[1] // 2] = 0
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    exact = model(ids, attention_mask=mask, use_cache=False).logits
    assert relative_error(compiled(ids, attention_mask=mask).logits, exact) < 1e-5
