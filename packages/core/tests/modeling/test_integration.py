"""Test the model under torch.compile, FSDP2, peft, the Trainer and other dtypes."""

import copy

import pytest
import torch
import torch.distributed as dist
from transformers import Trainer, TrainingArguments

from support.exporting import check_exports
from support.two_ranks import check_sharded_in_bfloat16, run_on_two_ranks
from tokenmix_core.modeling import HybridConfig, HybridForCausalLM, causal_lm
from tokenmix_core.testing.closeness import relative_error
from tokenmix_core.testing.tracing import by_kernels

FIELDS = {
    "vocab_size": 59,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "mixers": ["gated_delta_net", "mamba2", "attention"],
    "mixer_options": {
        "gated_delta_net": {"num_heads": 1, "head_dim": 16},
        "mamba2": {"head_dim": 16, "state_size": 16},
        "attention": {"num_heads": 2},
    },
}


@pytest.fixture
def model():
    torch.manual_seed(0)
    return HybridForCausalLM(HybridConfig(**FIELDS))


@pytest.fixture
def ids():
    return torch.randint(0, 59, (2, 16), generator=torch.Generator().manual_seed(0))


def loss_and_gradients(model, ids, call=None):
    model.zero_grad()
    loss = (model if call is None else call)(ids, labels=ids).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


def test_training_compiles_into_one_graph(model, ids):
    model.train()
    loss, gradients = loss_and_gradients(model, ids)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    again, compiled_gradients = loss_and_gradients(model, ids, compiled)
    torch.testing.assert_close(again, loss)
    for name, exact in gradients.items():
        assert relative_error(compiled_gradients[name], exact) < 1e-4, name


@torch.no_grad()
def test_documents_told_by_positions_compile_into_one_graph(ids):
    attention = {"mixers": ["attention"], "mixer_options": {"attention": {"num_heads": 2}}, "num_hidden_layers": 1}
    model = by_kernels(HybridForCausalLM(HybridConfig(**FIELDS | attention)))
    compiled = torch.compile(model.eval(), backend="eager", fullgraph=True)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        for lengths in ([7, 9], [2, 8, 1, 5]):
            positions = torch.cat([torch.arange(n) for n in lengths]).unsqueeze(0)
            exact = model(ids[:1], position_ids=positions, use_cache=False).logits
            assert relative_error(compiled(ids[:1], position_ids=positions, use_cache=False).logits, exact) < 1e-5


@torch.no_grad()
def test_decoding_compiles(model, ids):
    model.eval()
    exact = model(ids, use_cache=False).logits
    compiled, cache = torch.compile(model, backend="eager"), model.make_cache(max_length=16)
    logits = [compiled(part, past_key_values=cache).logits for part in ids.split([12] + [1] * 4, 1)]
    assert relative_error(torch.cat(logits, 1), exact) < 1e-5


def test_autocast_keeps_recurrences_right(model, ids):
    loss, _ = loss_and_gradients(model, ids)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        narrow, gradients = loss_and_gradients(model, ids)
    assert abs(narrow - loss) < 0.02 * loss
    assert all(g.isfinite().all() and g.dtype == torch.float32 for g in gradients.values())


@torch.no_grad()
def test_a_bfloat16_model_decodes_as_it_scores(model, ids):
    exact = model.eval()(ids, use_cache=False).logits
    narrow = copy.deepcopy(model).to(torch.bfloat16)
    whole = narrow(ids, use_cache=False).logits
    cache = narrow.make_cache()
    steps = torch.cat([narrow(part, past_key_values=cache).logits for part in ids.split(1, 1)], 1)
    # both round the same sums, in different ways
    assert relative_error(steps, exact) < 2 * relative_error(whole, exact)
    assert cache.nbytes == narrow.state_bytes(16, 2)


def test_adapters_train_and_merge(model, ids):
    peft = pytest.importorskip("peft")
    frozen = {name: p.detach().clone() for name, p in model.named_parameters()}
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))
    optimizer = torch.optim.SGD([p for p in adapted.parameters() if p.requires_grad], lr=1.0)
    for _ in range(3):
        adapted.train()(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    adapted.eval()
    options = {"max_new_tokens": 3, "do_sample": False}
    logits, text = adapted(input_ids=ids).logits, adapted.generate(input_ids=ids, **options)
    merged = adapted.merge_and_unload()
    assert relative_error(merged(ids).logits, logits) < 1e-5
    assert torch.equal(merged.generate(ids, **options), text)
    for name, p in merged.named_parameters():
        changed = not torch.equal(p, frozen[name])
        assert changed == (name.endswith("proj.weight")), name


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_trainer_trains_saves_and_resumes(ids, tmp_path, checkpointing):
    rows = [{"input_ids": row, "labels": row} for row in ids.repeat(8, 1)]

    def trainer(steps):
        torch.manual_seed(0)
        args = TrainingArguments(
            output_dir=str(tmp_path),
            max_steps=steps,
            save_steps=3,
            logging_steps=1,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            learning_rate=1e-2,
            lr_scheduler_type="constant",
            gradient_checkpointing=checkpointing,
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
            seed=0,
        )
        return Trainer(HybridForCausalLM(HybridConfig(**FIELDS)), args, train_dataset=rows)

    whole = trainer(6)
    whole.train()
    losses = [entry["loss"] for entry in whole.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0]
    resumed = trainer(6)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    for p, q in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
    broken = tmp_path / "checkpoint-6" / "model.safetensors"
    broken.write_bytes(broken.read_bytes()[:1000])
    with pytest.raises(ValueError, match="damaged"):
        HybridForCausalLM.from_pretrained(tmp_path / "checkpoint-6")


@pytest.fixture
def one_process():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("tail", [False, True], ids=["head in the root", "head and norm in a unit"])
def test_sharded_tensors_start_and_train_like_others(one_process, ids, tail, monkeypatch):
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    with torch.device("meta"):
        model = HybridForCausalLM(HybridConfig(**FIELDS))
    mesh = dist.init_device_mesh("cpu", (1,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    if tail:
        fully_shard([model.model.norm, model.model.embed_tokens, model.lm_head], mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    for module in model.modules():
        module._is_hf_initialized = False
    torch.manual_seed(0)
    model.init_weights()
    assert all(isinstance(p, DTensor) for p in model.parameters())
    mixer = model.model.layers[0].mixer
    rates = mixer.A_log.full_tensor().exp()
    assert ((rates >= 1) & (rates <= 16)).all()
    plain = HybridForCausalLM(HybridConfig(**FIELDS))
    plain.load_state_dict({name: x.full_tensor() if isinstance(x, DTensor) else x
                           for name, x in model.state_dict().items()})  # fmt: skip
    loss, gradients = loss_and_gradients(plain, ids)
    monkeypatch.setattr(causal_lm, "warn_slower", lambda *names: pytest.fail(f"slower: {names}"))
    sharded = model.train()(ids, labels=ids).loss
    sharded.backward()
    torch.testing.assert_close(sharded, loss)
    for name, p in model.named_parameters():
        assert relative_error(p.grad.full_tensor(), gradients[name]) < 1e-4, name


HEAD_ALONE = """
import sys
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from tokenmix_core.modeling import HybridConfig, HybridForCausalLM

rank, folder, fields, frozen = int(sys.argv[1]), sys.argv[2], eval(sys.argv[3]), sys.argv[4] == "frozen"
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
torch.manual_seed(0)
model, plain = (HybridForCausalLM(HybridConfig(**fields)) for _ in range(2))
plain.load_state_dict(model.state_dict())
fully_shard(model.lm_head, mesh=dist.init_device_mesh("cpu", (2,)))
if frozen:
    model.model.requires_grad_(False)
ids = torch.randint(1, fields["vocab_size"], (2, 2, 20), generator=torch.Generator().manual_seed(1))
mean = sum(plain(x, labels=x).loss for x in ids) / 2
mean.backward()
optimizers = [torch.optim.SGD(x.lm_head.parameters(), lr=1.0) for x in (model, plain)]
loss = model(ids[rank], labels=ids[rank]).loss
loss.backward()
total = loss.detach().clone()
dist.all_reduce(total)
torch.testing.assert_close(total / 2, mean.detach())
gradient = model.lm_head.weight.grad.full_tensor()
torch.testing.assert_close(gradient, plain.lm_head.weight.grad, rtol=1e-4, atol=1e-6)
assert gradient.abs().max() > 1e-3
for optimizer in optimizers:
    optimizer.step()
again = model(ids[rank], labels=ids[rank]).loss
torch.testing.assert_close(again, plain(ids[rank], labels=ids[rank]).loss, rtol=1e-4, atol=1e-5)
assert abs(again - loss) > 1e-4
dist.destroy_process_group()
"""


PADDING_ALONE = """
import sys
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from tokenmix_core.modeling import HybridConfig, HybridForCausalLM

rank, folder, fields, wrapper = int(sys.argv[1]), sys.argv[2], eval(sys.argv[3]), sys.argv[4]
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
torch.manual_seed(0)
model, plain = (HybridForCausalLM(HybridConfig(**fields)) for _ in range(2))
plain.load_state_dict(model.state_dict())
if wrapper == "ddp":
    model = torch.nn.parallel.DistributedDataParallel(model)
else:
    mesh = dist.init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
ids = torch.randint(1, fields["vocab_size"], (2, 20), generator=torch.Generator().manual_seed(1))
(plain(ids, labels=ids).loss / 2).backward()
# rank 1 has no real token
mask = torch.full_like(ids, 1 - rank)
for _ in range(2):
    model.zero_grad()
    model(ids, attention_mask=mask, labels=ids).loss.backward()
whole = (p.grad.full_tensor() if wrapper == "fsdp2" else p.grad for p in model.parameters())
for gradient, p in zip(whole, plain.parameters()):
    torch.testing.assert_close(gradient, p.grad, rtol=1e-4, atol=1e-6)
dist.destroy_process_group()
"""


ONE_AFTER_THE_OTHER = """
import sys
rank = sys.argv[1]
for name, script, *call in eval(sys.argv[2]):
    sys.argv = [name, rank, *call]
    print(name, file=sys.stderr)
    exec(compile(script, name, "exec"), {"__name__": "__main__"})
"""


@pytest.mark.slow
def test_two_ranks_train_like_one_process(tmp_path):
    """One pair of processes tests two cases: only a head is sharded, and one rank's batch has only padding."""
    cases = [("head alone", HEAD_ALONE, repr(FIELDS | {"tie_word_embeddings": False}), "trained")]
    cases += [(f"padding alone, {x}", PADDING_ALONE, repr(FIELDS), x) for x in ("ddp", "fsdp2")]
    calls = []
    for name, script, *options in cases:
        (tmp_path / name).mkdir()
        calls.append((name, script, str(tmp_path / name), *options))
    run_on_two_ranks(ONE_AFTER_THE_OTHER, repr(calls))


@pytest.mark.slow
def test_fsdp2_of_a_model_in_bfloat16_keeps_float32_rates(tmp_path):
    options = {"gated_delta_net": {"num_heads": 2, "head_dim": 8}, "mamba2": {"head_dim": 8, "state_size": 8}}
    fields = {"vocab_size": 61, "hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 16}
    check_sharded_in_bfloat16(HybridConfig(**fields, mixers=list(options), mixer_options=options), tmp_path)


@pytest.mark.parametrize("strict", [False, True])
def test_one_exported_program_takes_any_length(model, strict):
    check_exports(model, strict=strict)


def test_an_exported_reference_says_that_it_has_no_gradient(model, ids):
    program = torch.export.export(model, (), {"input_ids": ids, "use_cache": False}).module()
    with pytest.raises(RuntimeError, match=r"tokenmix\.reference"):
        program(input_ids=ids, use_cache=False).logits.sum().backward()


@torch.no_grad()
def test_padding_compiles_into_one_graph(model, ids):
    model.eval()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for mask in (
        torch.ones_like(ids),
        (torch.arange(16) >= torch.tensor([[0], [5]])).long(),
        torch.ones_like(ids).tril(9),
    ):
        exact = model(ids, attention_mask=mask, use_cache=False).logits
        assert relative_error(compiled(ids, attention_mask=mask).logits, exact) < 1e-5


def test_the_loss_of_a_padded_batch_compiles_into_one_graph(model, ids):
    mask = (torch.arange(16) >= torch.tensor([[0], [5]])).long()
    exact = model.train()(ids, attention_mask=mask, labels=ids).loss
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(ids, attention_mask=mask, labels=ids).loss, exact)
