"""Test the model: cached decoding in any schedule, switches in generation, and the promise of linear mode."""

import json
import random
from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import ContinuousBatchingConfig, GenerationConfig

from support.exporting import check_exports
from support.two_ranks import check_sharded_in_bfloat16
from tokenmix_core.modeling import HybridConfig, HybridForCausalLM
from tokenmix_core.modeling.cache_name import CACHE
from tokenmix_core.testing.closeness import relative_error
from tokenmix_core.testing.fake_cuda_graph import graphs_everywhere
from tokenmix_core.testing.models import ModelContract, left_padded, logits_in_parts
from tokenmix_oryx.config import OryxConfig
from tokenmix_oryx.model import OryxForCausalLM, OryxModel

FIELDS = {
    "vocab_size": 61,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "intermediate_size": 32,
    "initializer_range": 0.2,
    "pad_token_id": 0,
}


def fields(linear_mixer, **options):
    return FIELDS | {"mixer_options": {"oryx": {"linear_mixer": linear_mixer, "head_dim": 8, **options}}}


FAMILIES = {"tm": fields("mamba2"), "tg": fields("gated_delta_net")}
SCHEDULE = [(0, "linear"), (5, "attention"), (11, "linear"), (16, "attention"), (21, "linear")]


class _Contract(ModelContract):
    config_class = OryxConfig
    model_class = OryxModel
    causal_lm_class = OryxForCausalLM


class TestSwitching(_Contract):
    configs: ClassVar = FAMILIES
    traced: ClassVar = {
        name: fields(name, head_dim=64) | {"hidden_size": 64, "num_hidden_layers": 1}
        for name in ("mamba2", "gated_delta_net")
    }
    inputs: ClassVar = {"mode": SCHEDULE}


@pytest.mark.parametrize("family", FAMILIES)
def test_one_exported_program_takes_any_length(family):
    torch.manual_seed(0)
    check_exports(OryxForCausalLM(OryxConfig(**FAMILIES[family])))


class TestAblated(_Contract):
    configs: ClassVar = {
        "tm": fields("mamba2", shared_query=True, grouped_norm=True, conv_size=0, rope="attention"),
        "tg": fields("gated_delta_net", output_gate=False, attention_l2_norm="key", kv_activation="none"),
    }
    inputs: ClassVar = {"mode": SCHEDULE}


@pytest.mark.slow
def test_fsdp2_of_a_model_in_bfloat16_keeps_float32_rates(tmp_path):
    check_sharded_in_bfloat16(OryxConfig(**FAMILIES["tm"]), tmp_path)


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def model(request):
    torch.manual_seed(0)
    return OryxForCausalLM(OryxConfig(**FAMILIES[request.param])).eval()


@pytest.fixture
def ids():
    return torch.randint(1, 61, (3, 19), generator=torch.Generator().manual_seed(0))


def test_old_configurations_with_options_as_fields_load(model, ids, tmp_path):
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    content = json.loads(path.read_text())
    old = content.pop("mixer_options")["oryx"]
    path.write_text(json.dumps(content | old | {"num_heads": 3, "mixer_options": {}}))
    again = OryxForCausalLM.from_pretrained(tmp_path)
    assert again.config.mixer_options == {"oryx": {**old, "num_heads": 3}}
    with torch.no_grad():
        assert torch.equal(again(ids, mode=SCHEDULE).logits, model(ids, mode=SCHEDULE).logits)


@torch.no_grad()
def test_promise_of_linear_mode_frees_only_oryx_layers(ids):
    options = {**fields("mamba2")["mixer_options"], "attention": {"num_heads": 3}}
    config = OryxConfig(**FIELDS | {"mixers": ["oryx", "attention"], "mixer_options": options})
    model = OryxForCausalLM(config).eval()
    kept, freed = model.state_bytes(100), model.state_bytes(100, linear_only=True)
    assert 0 < kept - freed == model.model.mixers[1].state_bytes(100, 1, torch.float32)
    outputs = [model.generate(ids, mode="linear", keep_kv=keep, max_new_tokens=5) for keep in (True, False)]
    assert torch.equal(*outputs)


@torch.no_grad()
def test_any_model_with_the_layer_takes_modes(model, ids):
    options = {**model.config.mixer_options, "attention": {"num_heads": 3}}
    plain = HybridForCausalLM(HybridConfig(**FIELDS, mixers=["oryx", "attention"], mixer_options=options)).eval()
    found = {str(mode): plain(ids, mode=mode, use_cache=False).logits for mode in ("linear", "attention", SCHEDULE)}
    assert torch.equal(plain(ids, use_cache=False).logits, found["attention"])
    assert len({x.sum().item() for x in found.values()}) == 3
    assert relative_error(logits_in_parts(plain, ids, [4, 1, 14], mode=SCHEDULE), found[str(SCHEDULE)]) < 1e-4
    with pytest.raises(ValueError, match="unknown input 'modes'; inputs of the mixers are: mode"):
        plain(ids, modes="linear")


MODELS = {}


def cached_model(family):
    if family not in MODELS:
        torch.manual_seed(0)
        MODELS[family] = OryxForCausalLM(OryxConfig(**FAMILIES[family])).eval()
    return MODELS[family]


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(sorted(FAMILIES)), st.randoms(use_true_random=False), st.integers(1, 40), st.booleans())
@torch.no_grad()
def test_any_schedule_and_split_equals_the_full_forward(family, rng: random.Random, tokens, per_sequence):
    model = cached_model(family)
    ids = torch.randint(1, 61, (2, tokens), generator=torch.Generator().manual_seed(tokens))
    split, left = [], tokens
    while left:
        split.append(min(left, rng.choice([1, 1, 1, 2, 3, 5, 8, 13])))
        left -= split[-1]
    starts = sorted({0, *(rng.randrange(1, tokens + 1) for _ in range(rng.randrange(5)))})
    schedule = [(s, rng.choice(["linear", "attention"])) for s in starts]
    if not per_sequence:
        whole = model(ids, mode=schedule, use_cache=False).logits
        assert relative_error(logits_in_parts(model, ids, split, mode=schedule), whole) < 1e-4
        return
    mode = torch.tensor([[rng.random() < 0.4 for _ in range(tokens)] for _ in range(2)])
    whole, cache, outputs = model(ids, mode=mode, use_cache=False).logits, model.make_cache(), []
    for part, modes in zip(ids.split(split, 1), mode.split(split, 1), strict=True):
        outputs.append(model(part, mode=modes, past_key_values=cache).logits)
    assert relative_error(torch.cat(outputs, 1), whole) < 1e-4


@torch.no_grad()
@pytest.mark.parametrize("mode", ["linear", "attention", SCHEDULE])
def test_left_padding_does_not_change_outputs(model, ids, mode):
    lengths = [19, 12, 2]
    mask = left_padded(lengths, 19)
    for split in ([19], [1] * 19, [7, 1, 5, 6]):
        padded = logits_in_parts(model, ids, split, mask, mode=mode)
        for row, n, tokens in zip(padded, lengths, ids, strict=True):
            exact = model(tokens[None, -n:], mode=mode, use_cache=False).logits[0]
            assert relative_error(row[-n:], exact) < 1e-4


@torch.no_grad()
def test_schedule_equals_its_tensor(model, ids):
    attends = torch.zeros(3, 19, dtype=torch.bool)
    attends[:, 5:11] = attends[:, 16:] = True
    outputs = [model(ids, mode=mode, use_cache=False).logits for mode in (SCHEDULE, attends)]
    assert torch.equal(*outputs)
    for mode in ("linear", "attention"):
        tensor = torch.full((3, 19), mode == "attention")
        got = [model(ids, mode=m, use_cache=False).logits for m in (mode, tensor, [(0, mode)])]
        assert torch.equal(got[0], got[2])
        assert relative_error(got[1], got[0]) < 1e-5


@torch.no_grad()
def test_outputs_differ_only_from_the_first_different_mode_on(model, ids):
    both = [model(ids, mode=[(0, "linear"), (9, m)], use_cache=False).logits for m in ("linear", "attention")]
    assert torch.equal(both[0][:, :9], both[1][:, :9])
    assert not torch.isclose(both[0][:, 9:], both[1][:, 9:]).all(-1).any()


def generate(model, ids, **options):
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None, **options}
    # without this mask, tokens of an earlier turn that equal the padding token would be masked
    options.setdefault("attention_mask", torch.ones_like(ids))
    return model.generate(ids, **options)


def by_hand(model, ids, mode_at, new=8):
    """Decode greedily by full forward passes, one sequence without padding."""
    for _ in range(new):
        mode = torch.tensor([[mode_at(t) == "attention" for t in range(ids.shape[1])]])
        ids = torch.cat((ids, model(ids, mode=mode, use_cache=False).logits[:, -1:].argmax(-1)), 1)
    return ids


PLANS = {
    "linear then attention": ({"prefill_mode": "linear", "generation_mode": "attention"}, lambda t: t >= 19),
    "attention then linear": ({"prefill_mode": "attention", "generation_mode": "linear"}, lambda t: t < 19),
    "a schedule through both": ({"mode": [(0, "linear"), (10, "attention"), (22, "linear")]}, lambda t: 10 <= t < 22),
    "a switch while generating": (
        {"prefill_mode": "linear", "generation_mode": [(0, "linear"), (23, "attention")]},
        lambda t: t >= 23,
    ),
    "a decision at each step": (
        {
            "prefill_mode": [(0, "attention"), (4, "linear")],
            "generation_mode": lambda s, x: ["attention", "linear"][s % 2],
        },
        lambda t: t < 4 or (t >= 19 and t % 2 == 1),
    ),
    "shares of the prompt": ({"prefill_mode": [(0.0, "linear"), (0.5, "attention")]}, lambda t: t >= 10),
    "a tensor": (
        {"prefill_mode": (torch.arange(19) % 3 == 0)[None], "generation_mode": "linear"},
        lambda t: t < 19 and t % 3 == 0,
    ),
    "a decision for each sequence": (
        {"prefill_mode": "linear", "generation_mode": lambda s, x: torch.full((len(x),), s % 2 == 0)},
        lambda t: t >= 19 and t % 2 == 1,
    ),
}  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("plan", PLANS)
def test_generation_follows_its_plan_with_and_without_cache(model, ids, plan):
    options, attends = PLANS[plan]
    exact = by_hand(model, ids[:1], lambda t: "attention" if attends(t) else "linear")
    assert torch.equal(generate(model, ids[:1], **options), exact)
    if plan == "a decision for each sequence":
        with pytest.raises(ValueError, match="use_cache=True"):
            generate(model, ids[:1], use_cache=False, **options)
    else:
        assert torch.equal(generate(model, ids[:1], use_cache=False, **options), exact)


@torch.no_grad()
@pytest.mark.parametrize("plan", ["linear then attention", "a switch while generating", "a tensor"])
def test_embeddings_and_tokens_generate_equal_tokens(model, ids, plan):
    embeds, (options, _) = model.get_input_embeddings()(ids[:1]), PLANS[plan]
    tokens = generate(model, ids[:1], **options)
    for use_cache in (True, False):
        found = generate(
            model, ids[:1, :0], inputs_embeds=embeds, attention_mask=torch.ones(1, 19), use_cache=use_cache, **options
        )
        assert torch.equal(found, tokens[:, 19:])


@torch.no_grad()
@pytest.mark.parametrize("plan", ["linear then attention", "a switch while generating", "shares of the prompt"])
def test_padded_batch_generates_like_single_sequences(model, ids, plan):
    lengths, (options, _) = [19, 12], PLANS[plan]
    mask = left_padded(lengths, 19)
    together = generate(model, ids[:2], attention_mask=mask, **options)
    for row, tokens, n in zip(together, ids, lengths, strict=False):
        assert torch.equal(row[19:], generate(model, tokens[None, -n:], **options)[0, n:])
    assert torch.equal(generate(model, ids[:2], attention_mask=mask, use_cache=False, **options), together)


@torch.no_grad()
@pytest.mark.parametrize("form", ["string", "tensor"])
def test_beams_and_copies_follow_the_plan(model, ids, form):
    prefill = "linear" if form == "string" else torch.rand(2, 19, generator=torch.Generator().manual_seed(1)) < 0.5
    options = {"prefill_mode": prefill, "generation_mode": "attention", "num_beams": 3}
    outputs = [generate(model, ids[:2], use_cache=u, **options) for u in (True, False)]
    assert torch.equal(*outputs)


@torch.no_grad()
def test_one_cache_serves_alternating_modes(model, ids):
    cache = model.make_cache()
    first = generate(model, ids[:1], prefill_mode="attention", generation_mode="linear", past_key_values=cache)
    seen = cache.length
    second = generate(model, first, prefill_mode="attention", generation_mode="attention", past_key_values=cache)
    exact = by_hand(model, first, lambda t: "attention" if t < 19 or t >= seen else "linear")
    assert torch.equal(second, exact)


@torch.no_grad()
@pytest.mark.parametrize("prefill", ["linear", "attention"])
def test_promise_keeps_no_keys_and_does_not_change_outputs(model, ids, prefill):
    options = {"prefill_mode": prefill, "generation_mode": "linear"}
    kept = generate(model, ids, return_dict_in_generate=True, **options)
    freed = generate(model, ids, return_dict_in_generate=True, keep_kv=False, **options)
    assert torch.equal(kept.sequences, freed.sequences)
    held, constant = kept.past_key_values, freed.past_key_values
    assert held.nbytes == model.state_bytes(held.length, 3)
    assert constant.nbytes == constant.allocated_nbytes == model.state_bytes(5, 3, linear_only=True)
    assert constant.nbytes < held.nbytes


@torch.no_grad()
def test_memory_is_constant_after_the_promise(model, ids):
    cache = model.make_cache()
    cache.promise_linear()
    sizes = set()
    for _ in range(4):
        model(ids, mode="linear", past_key_values=cache)
        model(ids[:, :1], mode=[(0, "linear")], past_key_values=cache)
        sizes.add(cache.allocated_nbytes)
    assert sizes == {model.state_bytes(0, 3, linear_only=True)}


@torch.no_grad()
@pytest.mark.parametrize("mode", ["attention", [(0, "linear"), (22, "attention")], "tensor"])
def test_attention_after_the_promise_raises(model, ids, mode):
    cache = model.make_cache()
    cache.promise_linear()
    model(ids, mode="linear", past_key_values=cache)
    mode = torch.arange(5).expand(3, -1) == 4 if mode == "tensor" else mode
    with pytest.raises(ValueError, match="promise of linear mode"):
        model(ids[:, :5], mode=mode, past_key_values=cache)
    # the refused call did not change the cache
    assert cache.length == 19
    whole = model(torch.cat((ids, ids[:, :5]), 1), mode="linear", use_cache=False).logits[:, 19:]
    assert relative_error(model(ids[:, :5], mode="linear", past_key_values=cache).logits, whole) < 1e-4


@torch.no_grad()
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"generation_mode": "attention", "keep_kv": False}, "promises linear mode"),
        ({"mode": "linear", "prefill_mode": "linear"}, "either mode"),
        ({"prefill_mode": torch.ones(3, 19, dtype=torch.bool)}, "give generation_mode too"),
        ({"generation_mode": torch.ones(3, 1, dtype=torch.bool)}, "a function of the step"),
        ({"generation_mode": lambda s, x: "maybe"}, "must return 'linear'"),
        ({"generation_mode": [(0.0, "linear"), (0.5, "attention")]}, "must be positions"),
        ({"prefill_mode": torch.ones(3, 7, dtype=torch.bool), "generation_mode": "linear"}, r"\[3, 19\], got \[3, 7\]"),
        ({"prefill_mode": "both"}, "got 'both'"),
    ],
)
def test_invalid_plans_raise(model, ids, options, message):
    with pytest.raises(ValueError, match=message):
        generate(model, ids, **options)


@torch.no_grad()
def test_default_modes_apply_within_their_context(model, ids):
    exact = {m: model(ids, mode=m, use_cache=False).logits for m in ("linear", "attention")}
    assert torch.equal(model(ids, use_cache=False).logits, exact["attention"])
    with model.modes("linear"):
        assert torch.equal(model(ids, use_cache=False).logits, exact["linear"])
        assert torch.equal(generate(model, ids), generate(model, ids, mode="linear"))
    with model.modes([(0.0, "linear"), (0.975, "attention")], "linear"):
        plan = {"prefill_mode": [(0.0, "linear"), (0.975, "attention")], "generation_mode": "linear"}
        assert torch.equal(generate(model, ids), generate(model, ids, **plan))
    assert torch.equal(model(ids, use_cache=False).logits, exact["attention"])
    with pytest.raises(ValueError, match="got 'sometimes'"), model.modes("sometimes"):
        pass


@torch.no_grad()
def test_chunked_prefill_generates_equal_tokens(model, ids):
    options = {"prefill_mode": SCHEDULE, "generation_mode": "linear"}
    assert torch.equal(generate(model, ids, prefill_chunk_size=4, **options), generate(model, ids, **options))


def test_compiled_training_step_in_mixed_modes_is_one_graph(ids):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1}
    model = OryxForCausalLM(OryxConfig(**fields("mamba2", head_dim=16, impl="triton") | sizes)).train()
    mode = torch.arange(19).expand(3, -1) % 4 == 0
    exact = model(ids, labels=ids, mode=mode).loss
    exact.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    torch.compiler.reset()
    loss = torch.compile(model, fullgraph=True, backend="eager")(ids, labels=ids, mode=mode).loss
    loss.backward()
    assert torch.allclose(loss, exact)
    for name, p in model.named_parameters():
        assert relative_error(p.grad, grads[name]) < 1e-5, name


@torch.no_grad()
def test_padding_compiles_into_one_graph(model, ids):
    mask = left_padded([ids.shape[1], 3, 7][: len(ids)], ids.shape[1])
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for mode in ("linear", "attention"):
        exact = model(ids, attention_mask=mask, use_cache=False, mode=mode).logits
        assert relative_error(compiled(ids, attention_mask=mask, mode=mode).logits, exact) < 1e-5, mode


def test_only_eager_attention_can_be_requested():
    from transformers import AutoModelForCausalLM

    config = OryxConfig(**FAMILIES["tm"])
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    assert {mixer.impl for mixer in model.model.mixers} == {"reference"}
    with pytest.raises(ValueError, match="one of 'eager' for OryxMixer, got 'sdpa'"):
        AutoModelForCausalLM.from_config(OryxConfig(**FAMILIES["tm"]), attn_implementation="sdpa")


@pytest.mark.parametrize(
    "modes",
    [
        {"prefill_mode": "linear", "generation_mode": [(0, "linear"), (8, "attention"), (14, "linear")]},
        {"prefill_mode": "attention", "generation_mode": "linear", "keep_kv": False},
        {"prefill_mode": "linear", "generation_mode": lambda step, ids: ids[:, -1] % 2 == 0},
    ],
    ids=["schedule", "promise", "by sequence"],
)
def test_modes_switch_between_captured_steps(modes):
    torch.manual_seed(0)
    model = OryxForCausalLM(OryxConfig(**FAMILIES["tg"])).eval()
    ids = torch.randint(1, 61, (3, 7))
    options = {"attention_mask": left_padded([7, 4, 2], 7), "max_new_tokens": 14, "do_sample": False, **modes}
    with graphs_everywhere():
        for beams in (1, 2):
            said = [model.generate(ids, num_beams=beams, decoding_graph=graph, **options) for graph in (False, True)]
            assert torch.equal(*said), beams
    assert len(model.step_store) == 2


def _served(model, requests):
    """Return the tokens of requests (prompt, inputs) that are served at the same time."""
    config = GenerationConfig(max_new_tokens=8, do_sample=False, pad_token_id=0)
    # chunked prompts, and too few pages, so that some requests are preempted
    pool = ContinuousBatchingConfig(page_size=4, num_blocks=20, max_batch_tokens=12)
    with model.continuous_batching_context_manager(config, continuous_batching_config=pool) as manager:
        manager.keep_prefixes(1 << 20)
        names = [manager.add_request(prompt, mixer_inputs=inputs) for prompt, inputs in requests]
        results = {}
        while set(names) - set(results):
            result = manager.get_result(timeout=60)
            assert result is not None
            assert result.error is None
            if result.is_finished():
                results[result.request_id] = result.generated_tokens
        return [results[name] for name in names], manager.model.states.prefixes


@pytest.mark.skipif(CACHE != "cache", reason="the engine before transformers 5.24 has another interface")
@torch.no_grad()
def test_requests_with_modes_of_their_own_in_one_batch(model, ids):
    def alone(prompt, **modes):
        out = model.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False, pad_token_id=0, **modes)
        return out[0, len(prompt) :].tolist()

    modes = ["linear", "attention", [(0, "linear"), (9, "attention")], [(0.0, "attention"), (0.5, "linear")], None]
    prompts = [ids[i % 3, : 19 - i % 4].tolist() for i in range(10)]
    requests = [(x, {} if modes[i % 5] is None else {"mode": modes[i % 5]}) for i, x in enumerate(prompts)]
    expected = [alone(prompt, **inputs) for prompt, inputs in requests]
    # prefix snapshots of one mode must not serve requests in another mode
    found, prefixes = _served(model, requests * 2)
    assert found == expected * 2
    assert prefixes.counts["prefix_hits"] > 0
    for prefill, generation, keep in (("linear", "attention", True), ("attention", "linear", False)):
        with model.modes(prefill, generation, keep_kv=keep):
            wanted = [alone(x, prefill_mode=prefill, generation_mode=generation, keep_kv=keep) for x in prompts]
            assert _served(model, [(x, {}) for x in prompts])[0] == wanted
            if not keep:
                with pytest.raises(ValueError, match="keys and values are not kept"):
                    model.request_inputs({"mode": "attention"}, 5)
    for wrong, told in (("fast", "mode"), ([(1, "linear")], "must increase from 0"), (3, "a request's mode must be")):
        with pytest.raises(ValueError, match=told):
            model.request_inputs({"mode": wrong}, 5)
    with pytest.raises(ValueError, match="the model takes no other"):
        model.request_inputs({"other": 1}, 5)
