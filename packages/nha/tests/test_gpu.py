"""The layer on a GPU, with all options: agreement with the eager form in float64, decoding, constant memory."""

import copy

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tokenmix_core.testing.agreement import RoundedProducts
from tokenmix_core.testing.closeness import assert_within
from tokenmix_core.testing.fake_cuda_graph import assert_graphs_train_alike
from tokenmix_core.testing.models import left_padded, logits_in_parts
from tokenmix_nha import NhaConfig, NhaForCausalLM, nha_layers, using_windows
from tokenmix_nha.conversion import convert
from tokenmix_nha.evals import slot_shares
from tokenmix_nha.recipes import RECIPES

pytestmark = pytest.mark.gpu

TOKENS = 150
FORMS = {
    "window 32": {"window": 32},
    # 0.4 makes the gates differ: if slots are nearly equal, the gradient of q cancels, which magnifies rounding errors
    "slots alone": {"window": 0, "gate_normalizer": 0.4},
    "slots alone, rotated": {"window": 0, "positions": "both", "gate_normalizer": 0.4},
    "window past the end": {"window": 200},
    "hybrid": {"window": [20, "full"]},
    "without slots": {"window": 40, "slots": 0},
    "grouped heads, 128 slots": {"window": 40, "num_heads": 4, "num_kv_heads": 1, "head_dim": 64, "slots": 128},
    "heads of 128, 16 slots": {"window": 20, "num_heads": 1, "head_dim": 128, "slots": 16},
    "rotated slots": {"window": 40, "positions": "both"},
    "no positions": {"window": 40, "positions": "none"},
    "learned positions": {"window": 40, "positions": "learned", "max_positions": 256},
    "no shift": {"window": 40, "token_shift": False},
    "fixed sum": {"window": 40, "fusion": "fixed"},
    "learned sum": {"window": 40, "fusion": "learned"},
}
BFLOAT16, FLOAT32 = torch.bfloat16, torch.float32
# a float32 matmul of core's kernels is three tf32 matmuls; NHA's kernels sum gates in another order than the eager form
FLOORS = {BFLOAT16: None, FLOAT32: 8 * torch.finfo(FLOAT32).eps}


def build(window, **options):
    torch.manual_seed(0)
    fields = {"vocab_size": 512, "hidden_size": 128, "num_hidden_layers": 2, "intermediate_size": 256}
    layers = nha_layers(window, **{"num_heads": 2, "slots": 64} | options)
    return NhaForCausalLM(NhaConfig(**fields, **layers, initializer_range=0.05, pad_token_id=0))


def three(model, dtype):
    """Return the model in float64 and `dtype` on the CPU and in `dtype` on the GPU, with the same weights."""
    narrow = model.to(dtype)
    return copy.deepcopy(narrow).double(), narrow, copy.deepcopy(narrow).cuda()


def step(model, ids):
    model.train()
    loss = model(ids, labels=ids).loss
    loss.backward()
    return {"loss": loss.detach()} | {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.fixture
def ids():
    return torch.randint(1, 512, (2, TOKENS), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("form", FORMS)
def test_a_training_step_errs_no_more_than_the_eager_one(form, ids):
    exact, eager, fast = three(build(**FORMS[form]), BFLOAT16)
    exact, fast = step(exact, ids), step(fast, ids.cuda())
    # the eager operation multiplies in float32; rounding its operands to the kernels' dtype gives comparable errors
    with RoundedProducts(BFLOAT16):
        eager = step(eager, ids)
    assert set(fast) == set(exact)
    # the eager error of one short vector may be small by chance: compare the gradients of all vectors as one
    short = [name for name, x in fast.items() if x.dim() == 1]
    for grads in (exact, eager, fast):
        grads["vectors"] = torch.cat([grads.pop(name) for name in short])
    for name, x in fast.items():
        assert_within(name, x, exact[name], eager[name], floor=torch.finfo(BFLOAT16).eps)


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("form", FORMS)
@torch.no_grad()
def test_decoding_errs_no_more_than_one_eager_call(form, dtype, ids):
    exact, eager, fast = (model.eval() for model in three(build(**FORMS[form]), dtype))
    truth, baseline = exact(ids, use_cache=False).logits, eager(ids, use_cache=False).logits
    floor = FLOORS[dtype]
    assert_within("whole", fast(ids.cuda(), use_cache=False).logits, truth, baseline, floor=floor)
    for lengths in ([TOKENS], [100] + [1] * 50, [63, 1, 64, 22]):
        assert_within(str(lengths[:3]), logits_in_parts(fast, ids.cuda(), lengths), truth, baseline, floor=floor)
    mask = left_padded([TOKENS, 37], TOKENS)
    alone = exact(ids[1:, -37:], use_cache=False).logits
    baseline_alone = eager(ids[1:, -37:], use_cache=False).logits
    padded = logits_in_parts(fast, ids.cuda(), [120] + [1] * 30, mask.cuda())
    assert_within("padded", padded[1, -37:], alone[0], baseline_alone[0], floor=floor)


@torch.no_grad()
def test_decoding_takes_constant_memory(ids):
    model = build(window=[0, 32]).to(BFLOAT16).cuda().eval()
    cache = model.make_cache()
    model(ids.cuda(), past_key_values=cache)
    sizes = []
    for _ in range(64):
        model(ids[:, :1].cuda(), past_key_values=cache)
        torch.cuda.synchronize()
        sizes.append((torch.cuda.memory_allocated(), cache.nbytes))
    assert len(set(sizes[8:])) == 1
    assert cache.nbytes == model.state_bytes(TOKENS, 2, BFLOAT16) == model.state_bytes(10**6, 2, BFLOAT16)


@torch.no_grad()
def test_decoding_does_not_synchronise(ids):
    model, ids = build(window=[32, "full"]).to(BFLOAT16).cuda().eval(), ids.cuda()
    cache = model.make_cache(max_length=TOKENS + 20)
    out = model(ids, past_key_values=cache)
    for waiting in ("default", "error"):
        for _ in range(3):
            token = out.logits[:, -1:].argmax(-1)
            torch.cuda.set_sync_debug_mode(waiting)
            try:
                out = model(token, past_key_values=cache)
            finally:
                torch.cuda.set_sync_debug_mode("default")


def test_training_does_not_synchronise(ids):
    model, ids = build(window=[32, "full"]).to(BFLOAT16).cuda(), ids.cuda()
    num_items = torch.tensor(290, device="cuda")
    for waiting in ("default", "error"):
        torch.cuda.set_sync_debug_mode(waiting)
        try:
            for windows in ([0, 32], [32, "full"]):
                with using_windows(model, windows):
                    model.train()(ids, labels=ids, num_items_in_batch=num_items).loss.backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_the_share_of_the_slots_equals_the_cpu_s(ids):
    model = build(window=[32, "full"]).eval()
    exact = slot_shares(copy.deepcopy(model).double(), ids)
    assert_within("share", slot_shares(model.cuda(), ids), exact, exact, floor=FLOORS[FLOAT32])


@torch.no_grad()
def test_a_converted_model_generates_the_same_tokens_as_on_the_cpu(ids):
    torch.manual_seed(0)
    sizes = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1, head_dim=64, initializer_range=0.05)
    model = convert(LlamaForCausalLM(config), [32, "full"], slots=64).eval()
    mask = left_padded([TOKENS, 60], TOKENS)
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    here = model.generate(ids, attention_mask=mask, **options)
    there = copy.deepcopy(model).cuda().generate(ids.cuda(), attention_mask=mask.cuda(), **options)
    assert torch.equal(there.cpu(), here)


def test_training_with_and_without_cuda_graphs_agrees(tmp_path):
    assert_graphs_train_alike(RECIPES["tiny"](), tmp_path)
