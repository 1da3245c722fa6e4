"""Test on a GPU: the layer in any mode against its eager form in float64, without waiting for the device."""

import pytest
import torch

from tokenmix_core.modeling import HybridCache
from tokenmix_core.nn.init import init_weights_
from tokenmix_core.nn.rotary import RotaryEmbedding
from tokenmix_core.testing.closeness import assert_within, relative_error
from tokenmix_core.testing.fake_cuda_graph import assert_graphs_train_alike
from tokenmix_oryx.config import OryxConfig
from tokenmix_oryx.mixer import OryxMixer
from tokenmix_oryx.model import OryxForCausalLM
from tokenmix_oryx.modes import Modes, draw_modes
from tokenmix_oryx.options import FAMILIES
from tokenmix_oryx.projection import project_by_mode, token_order
from tokenmix_oryx.recipes import RECIPES

pytestmark = pytest.mark.gpu
SIZES = {"vocab_size": 61, "hidden_size": 256, "num_hidden_layers": 2, "intermediate_size": 256}


def build(family, **fields):
    return OryxForCausalLM(OryxConfig(**SIZES, mixer_options={"oryx": {"linear_mixer": family}}, **fields))


def modes(kind, batch, tokens):
    if kind in ("linear", "attention"):
        return Modes(kind)
    if kind in ("chunks", "sorted"):
        drawn = [draw_modes(tokens, seed=0, index=i, attention_probability=0.4) for i in range(batch)]
    else:
        drawn = [torch.rand(tokens, generator=torch.Generator().manual_seed(i)) < 0.3 for i in range(batch)]
    found = Modes(None, torch.stack(drawn).cuda())
    return found.ordered() if kind == "sorted" else found


def gradients(mixer, x, upstream, mode):
    x = x.detach().requires_grad_()
    rotary = RotaryEmbedding(128, {"rope_theta": 1e4}).cuda()(torch.arange(x.shape[1], device="cuda")[None])
    o = mixer(x, rotary=rotary, mode=mode)[0]
    leaves = {"x": x} | {n: p for n, p in mixer.named_parameters()}
    # several gradients of each parameter: one gradient with a single value per head has too few values for a comparison
    # of errors
    grads = [
        torch.autograd.grad(o, list(leaves.values()), u.to(o.dtype), retain_graph=True, allow_unused=True)
        for u in upstream
    ]
    return {"o": o} | {n: torch.stack(g) for n, *g in zip(leaves, *grads, strict=True) if g[0] is not None}


@pytest.mark.parametrize("family", list(FAMILIES))
@pytest.mark.parametrize("kind", ["linear", "attention", "chunks", "sorted", "tokens"])
def test_bfloat16_errors_do_not_exceed_those_of_eager_code(family, kind):
    torch.manual_seed(0)
    mixers = {}
    for impl in (None, "reference"):
        mixers[impl] = OryxMixer(256, linear_mixer=family, impl=impl)
    for module in mixers[None].modules():
        init_weights_(module, 0.05)
    weights = mixers[None].state_dict()
    x, upstream = (torch.randn(n, 2, 700, 256, device="cuda").bfloat16() for n in (1, 8))
    x, mode = x[0], modes(kind, 2, 700)
    found = {}
    for name, impl, dtype in (
        ("ours", None, torch.bfloat16),
        ("eager", "reference", torch.bfloat16),
        ("exact", "reference", torch.float64),
    ):
        mixer = OryxMixer(256, linear_mixer=family, impl=impl).cuda()
        mixer.load_state_dict({n: p.bfloat16() if n not in mixer.float32 else p for n, p in weights.items()})
        found[name] = gradients(mixer.to(dtype), x.to(dtype), upstream, mode)
    for name, exact in found["exact"].items():
        # a factor of 2.5, because gradients of weights sum the rounding errors of all tokens in another order
        assert_within(name, found["ours"][name], exact, found["eager"][name], factor=2.5)


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_grouped_projection_takes_any_share_without_synchronisation(share):
    torch.manual_seed(0)
    x, linear, attention, upstream = (torch.randn(*s, 256, device="cuda") for s in ((2, 700), (256,), (256,), (2, 700)))
    attends = (torch.arange(1400, device="cuda").view(2, 700) % 10 < 10 * share).contiguous()

    def both(x, linear, attention):
        return torch.where(attends[..., None], x @ attention.T, x @ linear.T)

    def grouped(x, linear, attention):
        return project_by_mode(x, linear, attention, token_order(attends))

    def run(function, dtype):
        leaves = [t.bfloat16().to(dtype).requires_grad_() for t in (x, linear, attention)]
        y = function(*leaves)
        return y, *torch.autograd.grad(y, leaves, upstream.bfloat16().to(dtype))

    exact, eager = run(both, torch.float64), run(both, torch.bfloat16)
    run(grouped, torch.bfloat16)
    # free memory full of NaN: a gradient that is not written would get it
    poison = torch.full((4, 256, 256), float("nan"), device="cuda", dtype=torch.bfloat16)
    del poison
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = run(grouped, torch.bfloat16)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for name, a, b, c in zip(("y", "dx", "dlinear", "dattention"), got, exact, eager, strict=True):
        assert_within(name, a, b, c)


@torch.no_grad()
@pytest.mark.parametrize("family", list(FAMILIES))
@pytest.mark.parametrize("kind", ["linear", "attention", "tokens"])
def test_any_split_equals_the_full_forward(family, kind):
    torch.manual_seed(0)
    model = build(family, initializer_range=0.05).cuda().eval()
    ids = torch.randint(0, 61, (2, 300), device="cuda")
    mode = kind if kind != "tokens" else modes("tokens", 2, 300).attention
    whole, cache, outputs, start = model(ids, mode=mode, use_cache=False).logits, model.make_cache(), [], 0
    for part_ids in ids.split([129, 1, 1, 100, *[1] * 69], 1):
        stop = start + part_ids.shape[1]
        part = mode if isinstance(mode, str) else mode[:, start:stop]
        outputs.append(model(part_ids, mode=part, past_key_values=cache).logits)
        start = stop
    assert relative_error(torch.cat(outputs, 1), whole) < 1e-3


@pytest.mark.parametrize("family", list(FAMILIES))
def test_training_and_decoding_never_synchronise(family):
    model = build(family).cuda().bfloat16()
    ids = torch.randint(0, 61, (2, 512), device="cuda")
    mode = modes("chunks", 2, 512).attention

    def train():
        model.train()(ids, labels=ids, mode=mode, num_items_in_batch=1022).loss.backward()

    cache = model.make_cache(600)
    with torch.no_grad():
        model.eval()(ids, mode=mode, past_key_values=cache)

    @torch.no_grad()
    def decode():
        for one in ("linear", "attention"):
            model.eval()(ids[:, :1], mode=one, past_key_values=cache)
        model(ids[:, :1], mode=mode[:, :1], past_key_values=cache)

    for run in (train, decode):
        run()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            run()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("family", list(FAMILIES))
def test_compiled_training_step_in_mixed_modes_is_one_graph(family):
    torch.manual_seed(0)
    model = build(family).cuda().train()
    ids = torch.randint(0, 61, (2, 256), device="cuda")
    compiled = torch.compile(model, fullgraph=True)
    for seed in (0, 1):
        drawn = torch.stack([draw_modes(256, seed=seed, index=i, chunk_size=32) for i in range(2)]).cuda()
        with torch.autocast("cuda", torch.bfloat16):
            exact, got = (m(ids, labels=ids, mode=drawn).loss for m in (model, compiled))
        assert abs(got - exact) < 1e-2 * exact
        got.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


@torch.no_grad()
def test_sequences_in_linear_mode_read_no_keys():
    mixer = OryxMixer(256).cuda()
    cache = HybridCache([mixer.make_state()])
    table, x = RotaryEmbedding(128, {"rope_theta": 1e4}).cuda(), torch.randn(2, 9, 256, device="cuda")
    for start, stop in ((0, 8), (8, 9)):
        cache.begin(2, stop - start, x.device)
        rotary = table(torch.arange(start, stop, device="cuda")[None])
        if start:
            # kernels must not read the keys of the sequence in linear mode
            cache.layers[0].kv.keys[1] = float("nan")
        attends = torch.tensor([[True], [False]], device="cuda").expand(2, stop - start)
        o = mixer(x[:, start:stop], state=cache.layers[0], rotary=rotary, mode=Modes(None, attends))[0]
        cache.end()
    assert o.isfinite().all()


def test_graphs_train_alike(tmp_path):
    assert_graphs_train_alike(RECIPES["tiny"](), tmp_path)
