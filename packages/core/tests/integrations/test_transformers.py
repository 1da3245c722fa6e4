"""Test that transformers' models give equal results on our operations, and that `undo` restores them."""

from __future__ import annotations

import copy
import functools
import importlib
import pickle
from types import MethodType

import pytest
import torch
import transformers
from packaging.version import Version

from hf_models import DELTA_RULE, field_model
from tokenmix_core.integrations import adapters
from tokenmix_core.integrations.adapters import norm_of_gated
from tokenmix_core.integrations.transformers import FAMILIES, use_fallback, use_kernels
from tokenmix_core.modeling.cache_name import CACHE
from tokenmix_core.testing.closeness import relative_error

# float32 sums in another order differ by less than this
TOLERANCE = 2e-5
# families that the installed transformers has
HERE = {name: family for name, family in FAMILIES.items() if Version(transformers.__version__) >= Version(family.since)}
EACH = pytest.mark.parametrize("family", HERE)


def prompt(rows=2, tokens=37):
    return torch.randint(3, 64, (rows, tokens), generator=torch.Generator().manual_seed(0))


def gradients(model, ids):
    model.zero_grad()
    model.train()
    model(ids, labels=ids, use_cache=False).loss.backward()
    model.eval()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@EACH
def test_logits_and_gradients_are_equal_with_our_kernels(family):
    model, ids = field_model(family), prompt()
    theirs, expected = gradients(model, ids), model(ids, use_cache=False).logits
    with use_kernels(model):
        ours, got = gradients(model, ids), model(ids, use_cache=False).logits
    # bit-equal results would mean that the same functions ran
    assert 0 < relative_error(got, expected) < TOLERANCE
    assert ours.keys() == theirs.keys()
    for name in theirs:
        assert relative_error(ours[name], theirs[name]) < 10 * TOLERANCE, name


@EACH
def test_bfloat16_errors_do_not_exceed_those_without_our_kernels(family):
    model, ids = field_model(family), prompt()
    exact = model(ids, use_cache=False).logits
    model = model.bfloat16()
    theirs = model(ids, use_cache=False).logits
    with use_kernels(model), torch.no_grad():
        ours = model(ids, use_cache=False).logits
    assert ours.dtype == theirs.dtype
    assert relative_error(ours, exact) < 2 * relative_error(theirs, exact)


@EACH
def test_generation_is_equal_for_padded_prompts_and_beams(family):
    model, ids = field_model(family), prompt()
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    for beams in (1, 2):
        options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "num_beams": beams}
        expected = model.generate(ids, attention_mask=mask, **options)
        with use_kernels(model):
            assert torch.equal(model.generate(ids, attention_mask=mask, **options), expected)


def cache_name(family):
    """Return transformers' name of the cache of a family's models."""
    return "cache_params" if CACHE == "past_key_values" and family == "mamba2" else CACHE


def in_chunks(model, ids, change=None):
    """Return the logits of 20, 16 and then single tokens, computed with the cache."""
    name, cache, logits = cache_name(model.config.model_type), None, []
    with torch.no_grad():
        for begin, end in ((0, 20), (20, 36), (36, 37)):
            if change is not None and begin:
                change()
            out = model(ids[:, begin:end], use_cache=True, **({} if cache is None else {name: cache}))
            cache = out[name]
            logits.append(out.logits)
    return torch.cat(logits, 1), cache


@EACH
def test_cache_is_compatible_with_both_kernels(family):
    model, ids = field_model(family), prompt()
    expected, theirs = in_chunks(model, ids)
    with use_kernels(model):
        got, cache = in_chunks(model, ids)
    assert relative_error(got, expected) < TOLERANCE
    states = "recurrent_states" if FAMILIES[family].scan else "conv_states"
    assert getattr(cache.layers[0], states)[0].shape == getattr(theirs.layers[0], states)[0].shape
    used = []
    begin_and_end = lambda: used.pop().undo() if used else used.append(use_kernels(model))  # noqa: E731
    assert relative_error(in_chunks(model, ids, begin_and_end)[0], expected) < TOLERANCE
    used.append(use_kernels(model))
    assert relative_error(in_chunks(model, ids, begin_and_end)[0], expected) < TOLERANCE
    used.pop().undo()


@pytest.mark.parametrize("family", [name for name, family in HERE.items() if family.scan])
def test_decoding_overwrites_the_state(family, monkeypatch):
    model, ids = field_model(family), prompt()
    steps = []
    for name in ("gated_delta_rule_step", "ssd_step"):
        step = getattr(importlib.import_module("tokenmix_core.ops"), name)
        monkeypatch.setattr(f"tokenmix_core.ops.{name}", lambda *x, step=step, **o: steps.append(1) or step(*x, **o))
    with use_kernels(model):
        in_chunks(model, ids)
    assert len(steps) == sum(type(m).__name__ == FAMILIES[family].layer for m in model.modules())


def separately(model, rows, lengths):
    """Return the logits of sequences that were computed alone, laid out like the packed rows."""
    with torch.no_grad():
        return torch.cat(
            [
                torch.cat([model(part, use_cache=False).logits for part in row[None].split(n, 1)], 1)
                for row, n in zip(rows, lengths, strict=True)
            ]
        )


def index_of(lengths):
    return torch.stack([torch.repeat_interleave(torch.arange(len(n)), torch.tensor(n)) for n in lengths]).int()


def restarting(lengths):
    return torch.stack([torch.cat([torch.arange(k) for k in n]) for n in lengths])


LENGTHS = (11, 19, 7)
BOUNDARIES = torch.tensor([0, 11, 30, 37], dtype=torch.int32)
FORMS = {
    "cu_seq_lens_q": {"cu_seq_lens_q": BOUNDARIES},
    "seq_idx": {"seq_idx": index_of([LENGTHS])},
    "seq_idx of one row": {"seq_idx": index_of([LENGTHS])[0]},
    "seq_idx and continued positions": {"seq_idx": index_of([LENGTHS]), "position_ids": torch.arange(37)[None]},
    "position_ids": {"position_ids": restarting([LENGTHS])},
    "position_ids and a mask": {
        "position_ids": restarting([LENGTHS]), "attention_mask": torch.ones(1, 37, dtype=torch.long)
    },
}  # fmt: skip


@EACH
@pytest.mark.parametrize("form", FORMS)
def test_packed_sequences_equal_separate_ones(family, form):
    model, row = field_model(family), prompt(1)
    with torch.no_grad(), use_kernels(model):
        packed = model(row, **FORMS[form]).logits
        assert relative_error(packed, separately(model, row, [LENGTHS])) < TOLERANCE


@EACH
@pytest.mark.parametrize("given", [{}, {"return_seq_idx": True}, {"return_flash_attn_kwargs": True}])
def test_gradients_of_flattened_batches_equal_those_of_separate_sequences(family, given):
    from transformers import DataCollatorWithFlattening

    model, row = field_model(family), prompt(1)
    parts = [part[0].tolist() for part in row.split(LENGTHS, 1)]
    batch = DataCollatorWithFlattening(**given)([{"input_ids": part} for part in parts])
    labels = {"num_items_in_batch": sum(LENGTHS) - 3}
    with use_kernels(family):
        model.train()
        model(**batch, **labels).loss.backward()
        packed = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        for part in row.split(LENGTHS, 1):
            model(part, labels=part, **labels).loss.backward()
    for name, expected in model.named_parameters():
        if expected.grad is not None:
            assert relative_error(packed[name], expected.grad) < 10 * TOLERANCE, name


@EACH
@pytest.mark.parametrize("form", ["seq_idx", "position_ids"])
def test_packed_sequences_in_several_rows(family, form):
    model, rows, lengths = field_model(family), prompt(), [(9, 28), (30, 7)]
    given = index_of(lengths) if form == "seq_idx" else restarting(lengths)
    with torch.no_grad(), use_kernels(model):
        packed = model(rows, **{form: given}).logits
        assert relative_error(packed, separately(model, rows, lengths)) < TOLERANCE


@EACH
def test_eager_attention_separates_as_well(family):
    model, row = field_model(family), prompt(1)
    model.set_attn_implementation("eager")
    with torch.no_grad(), use_kernels(model):
        packed = model(row, seq_idx=index_of([LENGTHS])).logits
        assert relative_error(packed, separately(model, row, [LENGTHS])) < TOLERANCE


def test_a_mask_of_the_caller_is_kept():
    model, row = field_model("granitemoehybrid"), prompt(1)
    full = torch.full((37, 37), -torch.inf).triu(1)[None, None]
    with torch.no_grad(), use_kernels(model):
        call = {"seq_idx": index_of([LENGTHS]), "position_ids": torch.arange(37)[None]}
        got = model(row, **call, attention_mask={"full_attention": full, "linear_attention": None}).logits
        separate = separately(model, row, [LENGTHS])
    assert relative_error(got[:, :11], separate[:, :11]) < TOLERANCE
    assert relative_error(got[:, 11:], separate[:, 11:]) > 0.01


@EACH
def test_sequences_that_cannot_be_separated_raise(family):
    model, rows = field_model(family), prompt()
    index, positions = index_of([LENGTHS] * 2), restarting([LENGTHS] * 2)
    padding = torch.ones_like(rows)
    padding[0, :5] = 0
    cache = model(rows, use_cache=True)[cache_name(family)]
    wrong = [
        ({"seq_idx": index[:, 1:]}, r"seq_idx must have shape \[B, T\] = \[2, 37\], got \[2, 36\]"),
        ({"seq_idx": index[0]}, r"seq_idx must have shape \[B, T\] = \[2, 37\], got \[37\]"),
        ({"cu_seq_lens_q": BOUNDARIES}, "pass seq_idx"),
        ({"seq_idx": index, "use_cache": True}, r"packed sequences \(seq_idx\) exclude a cache"),
        ({"position_ids": positions, cache_name(family): cache}, r"\(position_ids\) exclude a cache"),
        ({"seq_idx": index, "attention_mask": padding}, r"packed sequences \(seq_idx\) exclude padding"),
        ({"position_ids": positions, "attention_mask": padding}, r"\(position_ids\) exclude padding"),
    ]
    with torch.no_grad(), use_kernels(model):
        for call, message in wrong:
            with pytest.raises(ValueError, match=message):
                model(rows, **call)
        if family != "mamba2":
            model.config._attn_implementation = "flash_attention_2"
            with pytest.raises(ValueError, match="in one row only"):
                model(rows, seq_idx=index)
            model.config._attn_implementation = "of another library"
            with pytest.raises(ValueError, match="takes no mask"):
                model(rows, seq_idx=index)


def test_flash_attention_gets_boundaries_and_lengths(monkeypatch):
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    calls = []

    def attend(module, query, key, value, mask, **kwargs):
        calls.append((mask, kwargs))
        return torch.zeros_like(query.transpose(1, 2)), None

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "flash_attention_2", attend)
    # leave out qwen4_exp, whose indexed attention needs a mask
    for family in HERE.keys() - {"qwen4_exp"}:
        model = field_model(family)
        model.config._attn_implementation = "flash_attention_2"
        with torch.no_grad(), use_kernels(model):
            model(prompt(1), position_ids=restarting([LENGTHS]))
        for mask, kwargs in calls:
            assert mask is None
            assert torch.equal(kwargs["cu_seq_lens_q"], BOUNDARIES)
            assert torch.equal(kwargs["cu_seq_lens_k"], BOUNDARIES)
            assert kwargs["max_length_q"] == kwargs["max_length_k"] == 19
        assert bool(calls) == (family != "mamba2"), family
        calls.clear()


def test_packed_documents_and_a_cache_exclude_each_other():
    model, row = field_model("qwen3_5"), prompt(1)
    boundaries = torch.tensor([0, 11, 37], dtype=torch.int32)
    with use_kernels(model), pytest.raises(ValueError, match="use_cache=False"):
        model(row, cu_seq_lens_q=boundaries, use_cache=True)


@EACH
def test_family_affects_existing_and_new_models(family):
    before, ids = field_model(family), prompt(1)
    expected = before(ids, use_cache=False).logits
    with use_kernels(family) as use:
        home = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
        assert use.layers == 1 + hasattr(home, FAMILIES[family].norm)
        for model in (before, field_model(family)):
            assert 0 < relative_error(model(ids, use_cache=False).logits, expected) < TOLERANCE
    assert torch.equal(before(ids, use_cache=False).logits, expected)


def test_undo_restores_every_layer_and_may_be_repeated():
    model, ids = field_model("qwen3_5"), prompt(1)
    expected, attributes = model(ids, use_cache=False).logits, [set(vars(m)) for m in model.modules()]
    use = use_kernels(model)
    inner = use_kernels(model, impl="reference")
    with pytest.raises(ValueError, match="undo that first"):
        use.undo()
    inner.undo()
    use.undo()
    use.undo()
    assert [set(vars(m)) for m in model.modules()] == attributes
    assert torch.equal(model(ids, use_cache=False).logits, expected)


def test_other_models_and_copies_are_unaffected():
    model, other, ids = field_model("bamba"), field_model("bamba"), prompt(1)
    expected = other(ids, use_cache=False).logits
    with use_kernels(model):
        clone = copy.deepcopy(model)
        assert torch.equal(other(ids, use_cache=False).logits, expected)
    layer = next(m for m in clone.modules() if type(m).__name__ == "BambaMixer")
    assert layer.forward.__self__ is layer
    assert 0 < relative_error(clone(ids, use_cache=False).logits, expected) < TOLERANCE


@pytest.mark.parametrize("family", ["qwen3_next", "mamba2"])
def test_pickled_model_has_original_functions(family):
    model, ids = field_model(family), prompt()
    expected = model(ids, use_cache=False).logits
    with use_kernels(model):
        ours = model(ids, use_cache=False).logits
        again = pickle.loads(pickle.dumps(model))
    assert torch.equal(again(ids, use_cache=False).logits, expected)
    with use_kernels(again):
        assert torch.equal(again(ids, use_cache=False).logits, ours)
    assert torch.equal(again(ids, use_cache=False).logits, expected)


def test_accelerate_hooks_keep_working():
    from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module

    class Counts(ModelHook):
        calls = 0

        def pre_forward(self, module, *args, **kwargs):
            Counts.calls += 1
            return args, kwargs

    ids = prompt(1)
    for first in (True, False):
        model = field_model("mamba2")
        expected = model(ids, use_cache=False).logits
        layer = next(m for m in model.modules() if type(m).__name__ == "Mamba2Mixer")
        hook = lambda layer=layer: add_hook_to_module(layer, Counts())  # noqa: E731
        if first:
            hook()
        use = use_kernels(model)
        if not first:
            hook()
        calls = Counts.calls
        assert 0 < relative_error(model(ids, use_cache=False).logits, expected) < TOLERANCE
        assert Counts.calls == calls + 1
        use.undo()
        assert torch.equal(model(ids, use_cache=False).logits, expected)
        assert Counts.calls == calls + 2
        remove_hook_from_module(layer)
        assert torch.equal(model(ids, use_cache=False).logits, expected)


def test_compiled_layers_run_our_kernels_in_one_graph():
    model = field_model("mamba2")
    layer, x = model.backbone.layers[0].mixer, torch.randn(1, 9, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        theirs = layer(x)
        with use_kernels(layer):
            ours = layer(x)
            torch._dynamo.reset()
            assert torch.equal(torch.compile(layer, backend="eager", fullgraph=True)(x), ours)
    torch._dynamo.reset()
    assert 0 < relative_error(ours, theirs) < TOLERANCE


def test_gradient_checkpointing_gives_equal_gradients():
    model, ids = field_model("qwen3_next"), prompt()
    expected = gradients(model, ids)
    # transformers renamed this method in version 5.23
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    with use_kernels(model):
        got = gradients(model, ids)
    for name in expected:
        assert relative_error(got[name], expected[name]) < 10 * TOLERANCE, name


def test_impl_is_passed_on():
    model = field_model("mamba2")
    with use_kernels(model, impl="gluon"), pytest.raises(ValueError, match="impl='gluon'"):
        model(prompt(1), use_cache=False)


def test_unsupported_models_raise(monkeypatch):
    model = field_model("mamba2")
    for wrong, message in (
        ("llama", "expected a model, or one of qwen3_next"),
        (torch.nn.Linear(2, 2), "Linear has no layers"),
        (3, "got int"),
    ):
        with pytest.raises(ValueError, match=message):
            use_kernels(wrong)
    with pytest.raises(ValueError, match="impl must be"):
        use_kernels(model, impl="fla")
    layer = next(m for m in model.modules() if type(m).__name__ == "Mamba2Mixer")
    layer.forward = MethodType(lambda self, x: x, layer)
    with pytest.raises(ValueError, match=r"another library has changed the forward of 'backbone\.layers\.0\.mixer'"):
        use_kernels(model)
    assert "_runs_tokenmix_kernels" not in str(vars(model.backbone.layers[1].mixer))
    del layer.forward
    monkeypatch.setattr(type(layer), "forward", lambda self, x: x)
    with pytest.raises(ValueError, match=r"Mamba2Mixer of transformers .* does not call causal_conv1d_fn"):
        use_kernels(model)


@pytest.mark.parametrize("family", ["qwen3_5", "mamba2"])
def test_kernels_agree_with_the_model_on_a_gpu(family):
    model, ids = field_model(family, head=16, state=16), prompt(1, 6)
    name = cache_name(family)
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        with use_kernels(model, impl="triton"):
            out = model(ids[:, :5], use_cache=True)
            step = model(ids[:, 5:], use_cache=True, **{name: out[name]})
    assert relative_error(torch.cat((out.logits, step.logits), 1), expected) < TOLERANCE


@pytest.mark.parametrize("family", ["qwen3_5", "mamba2"])
def test_fallback_uses_torch_functions(family, monkeypatch):
    model, ids = field_model(family), prompt(1)
    expected = model(ids, use_cache=False).logits
    home = importlib.import_module(f"transformers.models.{family}.modeling_{family}")

    @functools.wraps(home.causal_conv1d_fn.__wrapped__)
    def installed(*args, **kwargs):
        raise AssertionError("a kernel")

    monkeypatch.setattr(home, "causal_conv1d_fn", installed)
    with use_fallback(model):
        assert torch.equal(model(ids, use_cache=False).logits, expected)
    with use_kernels(family), pytest.raises(ValueError, match="runs our kernels; undo that first"):
        use_fallback(model)


def test_every_family_has_norm_and_scan():
    for family, what in HERE.items():
        home = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
        assert all(hasattr(home, name) for name in (what.layer, what.body, *what.functions))
        # before transformers 5.23, Nemotron-H used the norm of Zamba2
        has_norm = not what.norm or hasattr(home, what.norm)
        assert has_norm or (family == "nemotron_h" and hasattr(home, "Zamba2RMSNormGated"))
        assert ("torch_chunk_gated_delta_rule" in what.scan) == (family in DELTA_RULE)


@pytest.mark.parametrize("norm_before_gate", [False, True])
@pytest.mark.parametrize("groups", [1, 2])
def test_falcon_norm_in_all_variants(groups, norm_before_gate):
    from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1RMSNormGated

    rng = torch.Generator().manual_seed(0)
    norm = FalconH1RMSNormGated(12, n_groups=groups, norm_before_gate=norm_before_gate)
    with torch.no_grad():
        norm.weight.normal_(generator=rng)
    for shape in ((2, 5, 12), (2, 12)):
        x, gate = torch.randn(shape, generator=rng), torch.randn(shape, generator=rng)
        expected = norm(x, gate)
        with use_kernels("falcon_h1"):
            assert norm.forward.__func__ is norm_of_gated
            assert relative_error(norm(x, gate), expected) < TOLERANCE


@pytest.mark.parametrize("family", ["qwen3_5", "mamba2"])
@pytest.mark.parametrize("impl", [None, "reference", "gluon"])
def test_norms_use_the_given_impl(family, impl, monkeypatch):
    norm, asked = adapters.ops.gated_rms_norm, []

    def noted(*args, impl=None, **options):
        asked.append(impl)
        return norm(*args, **options)

    monkeypatch.setattr(adapters.ops, "gated_rms_norm", noted)
    model = field_model(family)
    for what in (model, family):
        use = use_kernels(what, impl=impl)
        layers = [m for m in model.modules() if type(m).__name__ == FAMILIES[family].norm]
        for layer in layers:
            layer(torch.randn(2, len(layer.weight)), torch.randn(2, len(layer.weight)))
        use.undo()
        # there are no Gluon kernels for norms
        assert asked == [None if impl == "gluon" else impl] * len(layers)
        assert asked
        asked.clear()


def test_float32_norm_weights_give_float32_outputs():
    from transformers.models.bamba.modeling_bamba import BambaRMSNormGated

    sizes = {"group_size": 12} if "group_size" in BambaRMSNormGated.__init__.__code__.co_varnames else {}
    norm, x = BambaRMSNormGated(12, **sizes), torch.randn(2, 5, 12, dtype=torch.bfloat16)
    with use_kernels("bamba"):
        ours = norm(x, x)
    assert ours.dtype == norm(x, x).dtype == torch.float32


@pytest.mark.skipif("qwen4_exp" not in HERE, reason="transformers has no Qwen4-Exp")
def test_a_gate_with_sigmoid_is_kept():
    model, ids = field_model("qwen4_exp"), prompt()
    for module in model.modules():
        if type(module).__name__ == FAMILIES["qwen4_exp"].norm:
            module.activation = "sigmoid"
    expected = model(ids, use_cache=False).logits
    with use_kernels(model):
        assert 0 < relative_error(model(ids, use_cache=False).logits, expected) < TOLERANCE


@pytest.mark.skipif("qwen4_exp" not in HERE, reason="transformers has no Qwen4-Exp")
def test_packed_sequences_with_n_gram_embeddings_are_refused():
    model, row = field_model("qwen4_exp"), prompt(1)
    model.model.config.ple_layer_ids = [1]
    with use_kernels(model), pytest.raises(ValueError, match="n-gram embeddings"):
        model(row, seq_idx=index_of([LENGTHS]))
