"""Test on a GPU: kernels, caches and serving agree with the eager float64 model, without synchronisation."""

import copy
import random

import pytest
import torch
from transformers import GenerationConfig

from tokenmix_core.modeling import HybridConfig, HybridForCausalLM
from tokenmix_core.modeling.cache_name import CACHE
from tokenmix_core.testing.closeness import assert_within, relative_error
from tokenmix_core.testing.models import left_padded, logits_in_parts

pytestmark = pytest.mark.gpu

OPTIONS = {
    "attention": {"num_heads": 2, "qk_norm": True},
    "grouped": {"type": "attention", "num_heads": 4, "num_kv_heads": 1, "head_dim": 64},
    "window": {"type": "attention", "num_heads": 2, "window": 40},
    "sinks": {"type": "attention", "num_heads": 2, "window": 40, "sinks": 3},
    "gated_delta_net": {"num_heads": 1, "head_dim": 64, "num_v_heads": 2, "allow_neg_eigval": True},
    "odd_heads": {"type": "gated_delta_net", "num_heads": 1, "head_dim": 192},
    "mamba2": {"head_dim": 64, "state_size": 128},
}
TOKENS = 150
NEW_TOKENS = 16


def build(*mixers):
    torch.manual_seed(0)
    config = HybridConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=len(mixers),
        mixers=list(mixers),
        mixer_options={m: OPTIONS[m] for m in mixers},
        initializer_range=0.05,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    return HybridForCausalLM(config)


@pytest.fixture
def ids():
    return torch.randint(1, 512, (2, TOKENS), generator=torch.Generator().manual_seed(0))


def three(model):
    """Return the model in float64 and bfloat16 on the CPU, and in bfloat16 on the GPU, with equal weights."""
    narrow = model.to(torch.bfloat16)
    return copy.deepcopy(narrow).double(), narrow, copy.deepcopy(narrow).to("cuda")


def step(model, ids, **inputs):
    model.train()
    loss = model(ids, labels=ids, **inputs).loss
    loss.backward()
    return {"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters()}}


@pytest.mark.parametrize("mixer", OPTIONS)
def test_a_training_step_errs_no_more_than_the_eager_one(mixer, ids):
    exact, eager, fast = (
        step(model, ids.to(device)) for model, device in zip(three(build(mixer)), ("cpu", "cpu", "cuda"), strict=True)
    )
    for name, x in fast.items():
        # one number, or a short vector, may be right by chance: twice bfloat16's unit of rounding, as of others
        floor = None if x.dim() > 1 else 2 * torch.finfo(torch.bfloat16).eps
        assert_within(name, x, exact[name], eager[name], floor=floor)


@pytest.mark.parametrize("mixer", OPTIONS)
@torch.no_grad()
def test_decoding_errs_no_more_than_the_eager_whole(mixer, ids):
    exact, eager, fast = (model.eval() for model in three(build(mixer)))
    truth, baseline = exact(ids, use_cache=False).logits, eager(ids, use_cache=False).logits
    for chunks in ([TOKENS], [100] + [1] * 50, [63, 1, 64, 22]):
        assert_within(str(chunks[:3]), logits_in_parts(fast, ids.cuda(), chunks), truth, baseline)
    mask = left_padded([TOKENS, 37], TOKENS)
    alone = exact(ids[1:, -37:], use_cache=False).logits
    for chunks in ([TOKENS], [120] + [1] * 30, [120, 20, 10]):
        padded = logits_in_parts(fast, ids.cuda(), chunks, mask.cuda())
        assert_within("whole", padded[0], truth[0], baseline[0])
        assert_within("padded", padded[1, -37:], alone[0], eager(ids[1:, -37:], use_cache=False).logits[0])


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
def test_generation_is_that_of_the_cpu(ids, options):
    model = build("gated_delta_net", "window", "mamba2", "attention").eval()
    mask = left_padded([TOKENS, 60], TOKENS)
    options = {"max_new_tokens": 12, "do_sample": False, **options}
    here = model.generate(ids, attention_mask=mask, **options)
    there = copy.deepcopy(model).cuda().generate(ids.cuda(), attention_mask=mask.cuda(), **options)
    assert torch.equal(there.cpu(), here)


@torch.no_grad()
def test_captured_steps_err_at_most_twice_as_much_as_eager_ones():
    """Sequences are long, because a captured step reads storage of fixed capacity."""
    model = build("gated_delta_net", "attention", "mamba2", "window").cuda().eval().bfloat16()
    ids = torch.randint(1, 512, (2, 560), generator=torch.Generator().manual_seed(1)).cuda()
    # compute the reference on the CPU, because kernels with 16 bits could not
    exact = copy.deepcopy(model).cpu().double()(ids.cpu()).logits[:, 520:].cuda()
    found = {}
    for graph in (False, True):
        cache = model(ids[:, :520], use_cache=True).past_key_values
        with model.decoding(cache, graph=graph):
            steps = [model(ids[:, t : t + 1], past_key_values=cache).logits.clone() for t in range(520, 560)]
        found[graph] = torch.cat(steps, 1)
    assert_within("logits", found[True], exact, found[False])


@torch.no_grad()
def test_decoding_never_waits_for_the_device(ids):
    model = build("gated_delta_net", "window", "mamba2", "attention", "sinks", "odd_heads").eval()
    model, ids = model.to(torch.bfloat16).cuda(), ids.cuda()
    for mask in (None, left_padded([TOKENS, 60], TOKENS).cuda()):
        cache = model.make_cache(max_length=TOKENS + 20)
        out = model(ids, attention_mask=mask, past_key_values=cache)
        for waiting in ("default", "error"):
            for _ in range(3):
                mask = None if mask is None else torch.nn.functional.pad(mask, (0, 1), value=1)
                token = out.logits[:, -1:].argmax(-1)
                torch.cuda.set_sync_debug_mode(waiting)
                try:
                    out = model(token, attention_mask=mask, past_key_values=cache)
                finally:
                    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("packed", [False, True])
def test_training_never_waits_for_the_device(ids, packed):
    model = build("gated_delta_net", "window", "mamba2", "attention").to(torch.bfloat16).cuda()
    ids = ids.flatten()[None].cuda() if packed else ids.cuda()
    inputs = {"cu_seqlens": torch.tensor([0, 70, 70, 300], dtype=torch.int32, device="cuda")} if packed else {}
    num_items = torch.tensor(290, device="cuda")
    for waiting in ("default", "error"):
        torch.cuda.set_sync_debug_mode(waiting)
        try:
            step(model, ids, num_items_in_batch=num_items, **inputs)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_packed_documents_do_not_see_each_other(ids):
    model = build("gated_delta_net", "window", "mamba2", "attention").cuda()
    row = ids.flatten()[None].cuda()
    cu_seqlens = torch.tensor([0, 70, 70, 300], dtype=torch.int32, device="cuda")
    with torch.no_grad():
        packed = model(row, cu_seqlens=cu_seqlens, use_cache=False).logits
        apart = torch.cat([model(part, use_cache=False).logits for part in row.split([70, 230], 1)], 1)
        exact = copy.deepcopy(model).cpu().double()
        truth = torch.cat([exact(part, use_cache=False).logits for part in row.cpu().split([70, 230], 1)], 1)
    assert_within("packed", packed, truth, apart)


def test_training_compiles_into_one_graph(ids):
    model = build("gated_delta_net", "window", "mamba2", "attention").to(torch.bfloat16).cuda()
    plain = step(model, ids.cuda())
    plain = {name: x.clone() for name, x in plain.items()}
    exact = step(copy.deepcopy(model).cpu().double(), ids)
    model.zero_grad()
    compiled = torch.compile(model, fullgraph=True)
    compiled.train()(ids.cuda(), labels=ids.cuda()).loss.backward()
    for name, p in model.named_parameters():
        assert relative_error(p.grad, exact[name]) < 2 * max(relative_error(plain[name], exact[name]), 2**-8), name


def test_checkpointing_changes_nothing(ids):
    model = build("gated_delta_net", "mamba2", "attention").cuda()
    plain = {name: x.clone() for name, x in step(model, ids.cuda()).items()}
    model.zero_grad()
    model.gradient_checkpointing_enable()
    for name, x in step(model, ids.cuda()).items():
        assert relative_error(x, plain[name]) < 1e-3, name


def prompts():
    rng = random.Random(0)
    return [[rng.randrange(1, 512) for _ in range(rng.choice((1, 7, 64, 150)))] for _ in range(24)]


@torch.no_grad()
def assert_best(exact, prompt, tokens):
    """Assert that every token has the largest float64 logit up to rounding, given the tokens before it."""
    assert len(tokens) == NEW_TOKENS
    logits = exact(torch.tensor([prompt + tokens]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    assert (logits.amax(1) - chosen).max() < 0.02 * logits.abs().max()


@pytest.mark.skipif(CACHE != "cache", reason="the engine before transformers 5.24 has another interface")
@pytest.mark.parametrize("mixer", OPTIONS)
def test_continuous_batching_chooses_the_best_tokens(mixer):
    model = build(mixer).to(torch.bfloat16).eval()
    exact = copy.deepcopy(model).double()
    config = GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0, eos_token_id=-1)
    results = model.cuda().generate_batch(prompts(), generation_config=config, progress_bar=False)
    answers = sorted(results.values(), key=lambda x: int(x.request_id.rsplit("_", 1)[-1]))
    assert len(answers) == 24
    for prompt, answer in zip(prompts(), answers, strict=True):
        assert_best(exact, prompt, answer.generated_tokens)


@pytest.mark.parametrize("mixer", OPTIONS)
def test_assisted_decoding_chooses_the_best_tokens(mixer):
    model = build(mixer).to(torch.bfloat16).eval()
    exact = copy.deepcopy(model).double()
    model.cuda()
    for prompt in ([5, 6, 7] * 20, prompts()[1]):
        ids = torch.tensor([prompt], device="cuda")
        options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0, "eos_token_id": -1}
        out = model.generate(ids, prompt_lookup_num_tokens=4, **options)
        assert_best(exact, prompt, out[0, len(prompt) :].tolist())
