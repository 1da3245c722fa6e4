"""Conversion of each family: inherited weights, equality with the original, transformers' features on the result."""

import copy
import pickle
from typing import ClassVar

import pytest
import torch
from safetensors.torch import save_file
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    DataCollatorWithFlattening,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from tokenmix_core.testing.closeness import relative_error
from tokenmix_core.testing.fake_cuda_graph import graphs_everywhere
from tokenmix_core.testing.models import left_padded, logits_in_parts
from tokenmix_core.testing.modules import ModulesContract
from tokenmix_nha.cli import main
from tokenmix_nha.conversion import convert
from tokenmix_nha.model_windows import nha_mixers, set_windows, using_windows, windows_of

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "decoder_sparse_step": 1}
ORIGINALS = {
    "llama3": (
        LlamaForCausalLM,
        lambda: LlamaConfig(**SIZES, rope_parameters=LLAMA3 | {"original_max_position_embeddings": 32}),
    ),
    "llama with biases": (LlamaForCausalLM, lambda: LlamaConfig(**SIZES, attention_bias=True)),
    "qwen2.5": (Qwen2ForCausalLM, lambda: Qwen2Config(**SIZES)),
    "qwen3": (Qwen3ForCausalLM, lambda: Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True)),
    "qwen3-moe": (Qwen3MoeForCausalLM, lambda: Qwen3MoeConfig(**SIZES, head_dim=16, **EXPERTS)),
}
TOKENS = 19


@pytest.fixture(scope="module", params=list(ORIGINALS))
def original(request):
    model_class, config = ORIGINALS[request.param]
    torch.manual_seed(0)
    model = model_class(config()).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            # initial biases of 0 and norms of 1 would hide a weight that was not inherited
            if name.endswith("bias") or "norm" in name:
                p.add_(torch.randn_like(p) * 0.3)
    return model


@pytest.fixture
def ids():
    return torch.randint(1, 61, (3, TOKENS), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def test_full_windows_without_slots_equal_the_original(original, ids):
    converted = convert(original, "full", slots=0)
    assert relative_error(converted(ids).logits, original(ids).logits) < 1e-5
    mask = left_padded([TOKENS, TOKENS - 7, 2], TOKENS)
    options = {"max_new_tokens": 6, "do_sample": False}
    # ignore the first token of a padded row: its prediction comes from padding
    labels = ids.masked_fill(mask * mask.roll(1, 1) == 0, -100)
    got, exact = (model(ids, attention_mask=mask, labels=labels) for model in (converted, original))
    for row, n, wanted in zip(got.logits, mask.sum(1).tolist(), exact.logits, strict=True):
        assert relative_error(row[-n:], wanted[-n:]) < 1e-5
    assert abs(got.loss - exact.loss) < 1e-4
    said = converted.generate(ids, attention_mask=mask, **options)
    assert torch.equal(said, original.generate(ids, attention_mask=mask, **options))
    beams = converted.generate(ids, attention_mask=mask, num_beams=3, **options)
    assert torch.equal(beams, original.generate(ids, attention_mask=mask, num_beams=3, **options))


def test_weights_are_inherited_and_gates_are_pooled_keys(original):
    before = copy.deepcopy(original.state_dict())
    slots = 4
    converted = convert(original, [5, "full", 0], slots=slots)
    after = converted.state_dict()
    assert {name for name in after if name not in before} == {
        f"model.layers.{i}.self_attn.f_proj.{part}"
        for i in range(3)
        for part in (["weight", "bias"] if original.model.layers[0].self_attn.k_proj.bias is not None else ["weight"])
    }
    for name, weight in before.items():
        assert torch.equal(after[name], weight), name
        assert torch.equal(original.state_dict()[name], weight), name
    for i, layer in enumerate(original.model.layers):
        k, gates = layer.self_attn.k_proj, converted.model.layers[i].self_attn.f_proj
        dim = layer.self_attn.head_dim
        for h in range(2):
            for m in range(slots):
                rows = slice(h * dim + m * dim // slots, h * dim + (m + 1) * dim // slots)
                assert torch.allclose(gates.weight[h * slots + m], k.weight[rows].mean(0), atol=1e-6)
                if k.bias is not None:
                    assert torch.allclose(gates.bias[h * slots + m], k.bias[rows].mean(), atol=1e-6)
    assert windows_of(converted) == converted.config.window == [5, "full", 0]
    assert isinstance(converted, type(original))


@torch.no_grad()
def test_decoding_equals_one_forward_pass_and_ignores_padding(original, ids):
    converted = convert(original, [4, "full", 0], slots=4)
    whole = converted(ids, use_cache=False).logits
    assert relative_error(whole, original(ids).logits) > 1e-3
    # the first three columns hold only padding, so that the first calls of one token do, too
    mask = left_padded([TOKENS - 3, TOKENS - 7, 2], TOKENS)
    for lengths in ([TOKENS], [1] * TOKENS, [7, 1, 5, 6]):
        assert relative_error(logits_in_parts(converted, ids, lengths), whole) < 1e-4
        padded = logits_in_parts(converted, ids, lengths, mask)
        for row, tokens, n in zip(padded, ids, mask.sum(1).tolist(), strict=True):
            alone = converted(tokens[None, -n:], use_cache=False).logits[0]
            assert relative_error(row[-n:], alone) < 1e-4
    packed = converted(ids[:1], cu_seqlens=torch.tensor([0, 5, TOKENS], dtype=torch.int32)).logits
    apart = [converted(part, use_cache=False).logits for part in ids[:1].split([5, TOKENS - 5], 1)]
    assert relative_error(packed, torch.cat(apart, 1)) < 1e-4
    cache = converted(ids, use_cache=True).past_key_values
    assert cache.nbytes == converted.state_bytes(TOKENS, 3, torch.float32)
    with using_windows(converted, [4, 3, 0]):
        assert converted.state_bytes(100) == converted.state_bytes(10**6)


def test_a_converted_model_is_saved_loaded_and_generates(original, ids, tmp_path):
    converted = convert(original, [4, "full", 0], slots=4)
    converted.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(again) is type(converted)
    assert type(AutoConfig.from_pretrained(tmp_path)) is type(converted.config)
    assert type(AutoModel.from_pretrained(tmp_path)) is type(converted.model)
    assert windows_of(again) == [4, "full", 0]
    mask = left_padded([TOKENS, TOKENS - 7, 2], TOKENS)
    with torch.no_grad():
        assert torch.equal(again(ids).logits, converted(ids).logits)
    outputs = []
    for model, use_cache in ((converted, True), (again, True), (again, False)):
        options = {"max_new_tokens": 5, "do_sample": False, "use_cache": use_cache}
        outputs.append(model.generate(ids, attention_mask=mask, **options))
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


def test_layers_of_a_converted_model_keep_their_names_and_are_pickled(original, ids):
    converted = convert(original, [4, "full", 0], slots=4)
    names = {type(layer).__name__ for layer in converted.model.layers}
    assert names == {type(layer).__name__ for layer in original.model.layers}
    again = pickle.loads(pickle.dumps(converted))
    assert torch.equal(again(ids).logits, converted(ids).logits)


def test_decoding_in_a_cuda_graph_gives_the_same_tokens(original, ids):
    converted = convert(original, [4, "full", 0], slots=4)
    mask = left_padded([TOKENS, TOKENS - 7, 2], TOKENS)
    for options in ({}, {"num_beams": 2}):
        with graphs_everywhere():
            said = [
                converted.generate(ids, attention_mask=mask, max_new_tokens=9, decoding_graph=graph, **options)
                for graph in (False, True)
            ]
        assert torch.equal(*said)
    assert len(converted.step_store) == 2


def test_training_reaches_every_weight_with_and_without_checkpointing(original, ids):
    converted = convert(copy.deepcopy(original), 4, slots=4).train()
    gradients = []
    for checkpointing in (False, True):
        if checkpointing:
            converted.gradient_checkpointing_enable()
        converted.zero_grad()
        converted(ids, labels=ids).loss.backward()
        gradients.append({name: p.grad.clone() for name, p in converted.named_parameters() if p.grad is not None})
    assert {name for name, _ in converted.named_parameters()} == set(gradients[0])
    for name, exact in gradients[0].items():
        assert "experts" in name or exact.any(), name
        assert relative_error(gradients[1][name], exact) < 1e-5, name


def test_all_gradients_are_finite_if_no_token_is_predicted(original, ids):
    converted = convert(copy.deepcopy(original), 4, slots=4)
    whole = converted(ids, labels=ids).loss
    torch.testing.assert_close(converted(ids, labels=ids, num_items_in_batch=ids[:, 1:].numel()).loss, whole)
    for items in (None, 0, torch.tensor(0)):
        loss = converted(ids, labels=torch.full_like(ids, -100), num_items_in_batch=items).loss
        loss.backward()
        assert loss == 0
    assert all(p.grad is None or p.grad.isfinite().all() for p in converted.parameters())


@torch.no_grad()
def test_router_logits_and_hidden_states_keep_their_positions_under_padding(ids):
    model_class, config = ORIGINALS["qwen3-moe"]
    torch.manual_seed(0)
    original = model_class(config()).eval()
    converted = convert(original, "full", slots=0)
    mask = left_padded([TOKENS, TOKENS - 7, 2], TOKENS)
    options = {"output_router_logits": True, "output_hidden_states": True, "attention_mask": mask, "labels": ids}
    got, exact = (model(ids, **options) for model in (converted, original))
    assert abs(got.aux_loss - exact.aux_loss) < 1e-5
    real = mask.bool()
    for a, b in zip(got.hidden_states, exact.hidden_states, strict=True):
        assert relative_error(a[real], b[real]) < 1e-5


def test_the_command_converts_a_folder(tmp_path, capsys):
    torch.manual_seed(0)
    original = LlamaForCausalLM(LlamaConfig(**SIZES)).eval()
    original.save_pretrained(tmp_path / "llama")
    (tmp_path / "llama" / "tokenizer_config.json").write_text("{}")
    arguments = ["convert", str(tmp_path / "llama"), "--slots", "4", "--window", "5", "--out", str(tmp_path / "nha")]
    assert main([*arguments, "--full-layers", "0,2"]) == 0
    assert "2 of 3 layers full" in capsys.readouterr().out
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "nha")
    assert windows_of(model) == ["full", 5, "full"]
    assert (tmp_path / "nha" / "tokenizer_config.json").exists()
    set_windows(model, "full")
    assert [mixer.slots for mixer in nha_mixers(model)] == [4] * 3
    for wrong, message in (
        ([*arguments], "is not empty"),
        ([*arguments[:-1], str(tmp_path / "b"), "--full-layers", "3"], "full layers must lie from 0 to 2"),
        ([*arguments[:-1], str(tmp_path / "b"), "--dtype", "int8"], "--dtype must be"),
        ([*arguments[:-1], str(tmp_path / "b"), "--full-layers", "x"], "expected layers"),
        (["convert", str(tmp_path / "nha"), "--out", str(tmp_path / "b")], "expected a model of type"),
        (["convert", str(tmp_path / "none"), "--out", str(tmp_path / "b")], "holds no model"),
    ):
        assert main(wrong) == 2
        assert message in capsys.readouterr().err


def test_checkpoints_that_lack_weights_are_refused(tmp_path, capsys):
    """transformers would initialise missing weights at random, with a warning."""
    original = LlamaForCausalLM(LlamaConfig(**SIZES))
    converted = convert(original, "full", slots=4)
    weights = {name: x.clone() for name, x in converted.state_dict().items() if "layers.1.self_attn.f_proj" not in name}
    converted.save_pretrained(tmp_path / "nha")
    save_file(weights, tmp_path / "nha" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"1 missing \(model.layers.1.self_attn.f_proj.weight\)"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "nha")
    assert isinstance(AutoModelForCausalLM.from_pretrained(tmp_path / "nha", strict=False), type(converted))

    original.save_pretrained(tmp_path / "llama")
    file = tmp_path / "llama" / "model.safetensors"
    whole = file.read_bytes()
    weights = {name: x.clone() for name, x in original.state_dict().items() if "layers.2.mlp.up_proj" not in name}
    save_file(weights, file, metadata={"format": "pt"})
    arguments = ["convert", str(tmp_path / "llama"), "--out", str(tmp_path / "out")]
    assert main(arguments) == 2
    assert "1 missing (model.layers.2.mlp.up_proj.weight)" in capsys.readouterr().err
    file.write_bytes(whole[: len(whole) // 2])
    assert main(arguments) == 2
    assert "damaged or cut short" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_models_that_cannot_be_converted_are_refused():
    original = LlamaForCausalLM(LlamaConfig(**SIZES))
    with pytest.raises(ValueError, match="expected one for each of the 3 layers"):
        convert(original, [1, 2], slots=4)
    with pytest.raises(ValueError, match="output layer"):
        convert(original.model, "full")
    sliding = Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=4, max_window_layers=1)
    with pytest.raises(ValueError, match="sliding windows have no counterpart"):
        convert(Qwen2ForCausalLM(sliding), "full")
    with pytest.raises(ValueError, match="attention_dropout must be 0"):
        convert(LlamaForCausalLM(LlamaConfig(**SIZES, attention_dropout=0.1)), "full")
    converted = convert(original, "full", slots=0)
    ids = torch.ones(1, 3, dtype=torch.int64)
    with pytest.raises(ValueError, match="output_attentions"):
        converted(ids, output_attentions=True)
    with pytest.raises(ValueError, match="exactly one of"):
        converted()


@torch.no_grad()
def test_documents_of_the_collator_do_not_attend_to_each_other(original, ids):
    model = convert(original, [4, "full", 4], slots=3).eval()
    collator = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    documents = [{"input_ids": row[:n].tolist()} for row, n in zip(ids, (7, 4), strict=False)]
    apart = torch.cat([model(torch.tensor([d["input_ids"]]), use_cache=False).logits for d in documents], 1)
    batch = {name: x for name, x in collator(documents).items() if name != "labels"}
    for names in (["position_ids"], ["position_ids", "seq_idx"], ["cu_seq_lens_q", "cu_seq_lens_k", "max_length_q"]):
        given = {name: batch[name] for name in names}
        assert relative_error(model(batch["input_ids"], **given).logits, apart) < 1e-4, names
    with pytest.raises(ValueError, match="position_ids that restart"):
        model(batch["input_ids"], position_ids=batch["position_ids"], use_cache=True)
    with pytest.raises(ValueError, match="got 'flash_attention_2'"):
        model.set_attn_implementation("flash_attention_2")
    assert not getattr(model.config, "_attn_implementation", None)


@torch.no_grad()
def test_padding_of_a_converted_model_compiles_into_one_graph(ids):
    torch.manual_seed(0)
    model_class, config = ORIGINALS["llama3"]
    model = convert(model_class(config()), [4, "full", 4], slots=3).eval()
    mask = torch.ones_like(ids)
    mask[-1, :3] = 0
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    exact = model(ids, attention_mask=mask, use_cache=False).logits
    assert relative_error(compiled(ids, attention_mask=mask).logits[mask.bool()], exact[mask.bool()]) < 1e-5


class TestRowsOfConvertedModels:
    inputs: ClassVar[dict] = {}
    test_hooks = ModulesContract.test_a_hook_sees_the_rows_of_a_padded_batch
    test_adapters = ModulesContract.test_each_row_of_a_padded_batch_has_its_own_adapter

    @pytest.fixture
    def model(self, original):
        return convert(original, [4, "full", 0], slots=4)

    @torch.no_grad()
    def test_hooks_see_rows_in_parts_of_a_prompt_and_in_steps(self, model, ids):
        mask = left_padded([TOKENS - 3, TOKENS - 7, 2], TOKENS)
        lengths, seen = [7, 6, 1, 1, 4], []
        exact = logits_in_parts(model, ids, lengths, mask)
        for layer in model.model.layers:
            for module in (layer, layer.self_attn, layer.mlp):
                module.register_forward_pre_hook(
                    lambda m, args, given: seen.append((args[0] if args else given["hidden_states"]).shape[:2]),
                    with_kwargs=True,
                )
        got = logits_in_parts(model, ids, lengths, mask)
        assert seen == [torch.Size([3, n]) for n in lengths for _ in range(9)]
        assert relative_error(got[mask.bool()], exact[mask.bool()]) < 1e-5

    @pytest.mark.parametrize("reentrant", [False, True])
    def test_recomputed_layers_show_rows_again(self, model, ids, reentrant):
        mask, seen = left_padded([TOKENS, TOKENS - 7, 2], TOKENS), []

        def gradients():
            model.zero_grad()
            model(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss.backward()
            return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

        def steer(module, args, output):
            seen.append(output.shape[:2])
            return output + torch.arange(3).view(3, 1, 1)

        model.train()
        for layer in model.model.layers:
            layer.mlp.register_forward_hook(steer)
        exact, once = gradients(), len(seen)
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        recomputed = gradients()
        assert len(seen) == 3 * once
        assert set(seen) == {(3, TOKENS)}
        for name, gradient in exact.items():
            assert relative_error(recomputed[name], gradient) < 1e-5, name

    @torch.no_grad()
    def test_a_hook_on_a_router_sees_all_positions_of_all_rows(self, model, ids):
        routers = [m for m in model.modules() if type(m).__name__ == "Qwen3MoeTopKRouter"]
        if not routers:
            pytest.skip("no experts")
        mask, seen = left_padded([TOKENS, TOKENS - 7, 2], TOKENS), []
        options = {"output_router_logits": True, "attention_mask": mask, "labels": ids}
        exact = model(ids, **options)
        routers[0].register_forward_hook(lambda m, args, output: seen.append(args[0].shape[0]))
        got = model(ids, **options)
        assert seen == [ids.numel()]
        assert abs(got.aux_loss - exact.aux_loss) < 1e-5
        for a, b in zip(got.router_logits, exact.router_logits, strict=True):
            assert a.shape == b.shape
            assert relative_error(a, b) < 1e-5
