"""On a GPU: the layer against eager float64, decoding against the full forward, without synchronisation."""

import pytest
import torch

from tokenmix_core.modeling import HybridCache, decode_graph
from tokenmix_core.nn.init import init_weights_
from tokenmix_core.nn.rotary import RotaryEmbedding
from tokenmix_core.testing.closeness import assert_within, relative_error
from tokenmix_core.testing.fake_cuda_graph import assert_graphs_train_alike
from tokenmix_nats_l.config import NatsLConfig
from tokenmix_nats_l.mixer import NatsL
from tokenmix_nats_l.model import NatsLForCausalLM
from tokenmix_nats_l.recipes import RECIPES

pytestmark = pytest.mark.gpu
# heads of the paper's sizes, but fewer
SIZES = {"num_heads": 2, "head_dim": 128, "num_softmax_heads": 4}
MODEL = {"vocab_size": 61, "hidden_size": 256, "num_hidden_layers": 2, "intermediate_size": 256}


def gradients(layer, x, upstream, cu_seqlens, types):
    x = x.detach().requires_grad_()
    rotary = None
    if layer.rotary_dim is not None:
        table = RotaryEmbedding(layer.rotary_dim, {"rope_theta": 1e4}).cuda()
        rotary = table(torch.arange(x.shape[1], device="cuda")[None])
    # all three layers get equal types, because rounding could change the type of a chunk with nearly equal scores; the
    # gradients pass to each layer's own scores
    chosen = layer.types_of(x, cu_seqlens)
    layer.types_of = lambda *_: chosen._replace(
        softmax=chosen.softmax - chosen.softmax.detach() + types.softmax.to(chosen.softmax.dtype),
        linear=chosen.linear - chosen.linear.detach() + types.linear.to(chosen.linear.dtype),
    )
    o = layer(x, cu_seqlens=cu_seqlens, rotary=rotary)[0]
    leaves = {"x": x} | dict(layer.named_parameters())
    # several gradients of each parameter: one gradient with a single value per head has too few values for a comparison
    # of errors
    grads = [torch.autograd.grad(o, list(leaves.values()), u.to(o.dtype), retain_graph=True) for u in upstream]
    return {"o": o} | {n: torch.stack(g) for n, *g in zip(leaves, *grads, strict=True)}


@pytest.mark.parametrize("chunk", [64, 128, 256])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"rope": True},
        {"head_dim": 192, "num_softmax_heads": 6},
        {"own_chunk": "linear"},
        {"own_chunk": "softmax"},
    ],
)
def test_bfloat16_errors_do_not_exceed_those_of_eager_code(chunk, packed, options):
    torch.manual_seed(0)
    options = {**SIZES, "chunk": chunk, **options}
    first = NatsL(256, **options)
    for module in first.modules():
        init_weights_(module, 0.05)
    weights = first.state_dict()
    x, upstream = (torch.randn(n, 1 if packed else 2, 1100, 256, device="cuda").bfloat16() for n in (1, 8))
    cu_seqlens = torch.tensor([0, 70, 70, 700, 1100], dtype=torch.int32, device="cuda") if packed else None
    found, types = {}, None
    for name, impl, dtype in (
        ("exact", "reference", torch.float64),
        ("eager", "reference", torch.bfloat16),
        ("ours", None, torch.bfloat16),
    ):
        layer = NatsL(256, **options, impl=impl).cuda()
        layer.load_state_dict({n: p.bfloat16() if n not in layer.float32 else p for n, p in weights.items()})
        layer = layer.to(dtype)
        if types is None:
            types = layer.types_of(x[0].to(dtype), cu_seqlens)
            assert 0 < types.softmax.mean() < 1
        found[name] = gradients(layer, x[0].to(dtype), upstream, cu_seqlens, types)
    for name, exact in found["exact"].items():
        assert_within(name, found["ours"][name], exact, found["eager"][name])


@torch.no_grad()
@pytest.mark.parametrize("chunk", [64, 128, 256])
@pytest.mark.parametrize("types", ["learned", "alternate"])
def test_any_split_equals_the_full_forward(chunk, types):
    torch.manual_seed(0)
    options = {**SIZES, "chunk": chunk, "rope": True, "types": types}
    config = NatsLConfig(**MODEL, initializer_range=0.05, mixer_options={"nats_l": options})
    model = NatsLForCausalLM(config).cuda().eval()
    ids = torch.randint(0, 61, (2, 600), device="cuda")
    whole, cache, outputs = model(ids, use_cache=False).logits, model.make_cache(), []
    for part in ids.split([129, 1, 1, 300, *[1] * 169], 1):
        outputs.append(model(part, past_key_values=cache).logits)
    assert relative_error(torch.cat(outputs, 1), whole) < 1e-3


def test_training_and_steps_within_a_chunk_never_synchronise():
    options = {"nats_l": {**SIZES, "budget": 0.25}}
    model = NatsLForCausalLM(NatsLConfig(**MODEL, mixer_options=options)).cuda().bfloat16()
    ids = torch.randint(0, 61, (2, 512), device="cuda")
    cache = model.make_cache(600)
    with torch.no_grad():
        model.eval()(ids[:, :300], past_key_values=cache)

    def train():
        model.train()(ids, labels=ids, num_items_in_batch=1022).loss.backward()

    @torch.no_grad()
    def decode():
        model.eval()(ids[:, :1], past_key_values=cache)

    for run in (train, decode):
        run()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            run()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_compiled_training_step_is_one_graph():
    torch.manual_seed(0)
    model = NatsLForCausalLM(NatsLConfig(**MODEL, mixer_options={"nats_l": {**SIZES, "rope": True}})).cuda().train()
    ids = torch.randint(0, 61, (2, 256), device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        exact, got = (m(ids, labels=ids).loss for m in (model, torch.compile(model, fullgraph=True)))
    assert abs(got - exact) < 1e-2 * exact
    got.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


@torch.no_grad()
def test_steps_read_only_retained_tokens():
    torch.manual_seed(0)
    layer = NatsL(256, **SIZES, types="softmax").cuda()
    x = torch.randn(2, 130, 256, device="cuda")
    outputs = []
    for spoilt in (False, True):
        cache = HybridCache([layer.make_state()])
        for start, stop in ((0, 129), (129, 130)):
            cache.begin(2, stop - start, x.device)
            if spoilt and start:
                # pretend that a head of the second row retains one chunk: kernels must not read the other
                kept = cache.layers[0].kept
                kept.lengths[1, 0] = 64
                kept.keys[1, kept.table[1, 0, 1]] = float("nan")
            o = layer(x[:, start:stop], state=cache.layers[0])[0]
            cache.end()
        outputs.append(o)
    assert outputs[1].isfinite().all()
    assert torch.equal(outputs[0][0], outputs[1][0])
    assert not torch.equal(outputs[0][1], outputs[1][1])


@torch.no_grad()
def test_captured_steps_follow_pages_that_grow(monkeypatch):
    """Pages run out every two chunks, so that graphs are captured again; heads retain different chunks."""
    monkeypatch.setattr(decode_graph, "SPARE", 128)
    torch.manual_seed(0)
    config = NatsLConfig(**MODEL, initializer_range=0.05, mixer_options={"nats_l": {**SIZES, "rope": True}})
    model = NatsLForCausalLM(config).cuda().eval()
    ids = torch.randint(0, 61, (3, 100), device="cuda")
    cache = model.make_cache()
    options = {"max_new_tokens": 700, "do_sample": False, "pad_token_id": 0}
    eager = model.generate(ids, decoding_graph=False, **options)
    assert torch.equal(model.generate(ids, past_key_values=cache, **options), eager)
    kept = cache.layers[0].kept
    used = int(kept.lengths.sum(1).max()) // 64
    assert 0 < used < 4 * 12
    # spare: two chunks and one page for each head, or a tenth; and a page for chunks that no head retains
    assert kept.keys.shape[1] <= max(1.1 * used, used + 4 * 3) + 1


def test_graphs_train_alike(tmp_path):
    assert_graphs_train_alike(RECIPES["tiny"](), tmp_path)
