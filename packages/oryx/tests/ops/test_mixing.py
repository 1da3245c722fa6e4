"""Test a mixed call as one operation: values and gradients of fused kernels against the eager layer in float64."""

from functools import partial
from typing import ClassVar, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tokenmix_core.nn.rotary import RotaryEmbedding, Rotation
from tokenmix_core.testing.agreement import assert_agrees, granted_to_sums
from tokenmix_core.testing.operations import Call, KernelCase, OpContract, Results
from tokenmix_oryx.ops import MixOptions, mix
from tokenmix_oryx.ops.mixing.reference import mix_reference
from tokenmix_oryx.projection import token_order


class Output(NamedTuple):
    y: Tensor


MAMBA2 = MixOptions(2, False, False, False, True, True, 1, 1e-6)
DELTA = MixOptions(2, True, True, True, False, False, 2, 1e-6)
BORDERS = [0, 15, 15, 16, 40]


def made(options, B, T, K, dtype=torch.float32, device="cpu", W=4, seed=0):
    g = torch.Generator().manual_seed(seed)
    H, E = options.heads, options.heads * K
    # `shared` has at least 3 columns that `mix` does not read
    shapes = {"rows": (B * T, E), "shared": (B, T, 3 * E + 2 * H + 3), "norm_weight": (E,)}
    # "heads" has the rows A_log, dt_bias and D (not for the delta rule), each with one value per head: separately, they
    # would have too few values for a comparison of errors
    shapes |= {"k_weight": (E, W), "v_weight": (E, W), "heads": (3 if options.rotate_linear else 2, H)}
    x = {name: torch.randn(shape, generator=g, dtype=torch.float64) for name, shape in shapes.items()}
    x["heads"][0] -= 2
    return {name: t.to(device, torch.float32 if name == "heads" else dtype) for name, t in x.items()}


# a number a head: 3.8e-6 was seen on a processor (AVX2 alone) where the reference's own errs by 1.5e-6
least = granted_to_sums("dheads", times=5)


def modes(kind, B, T, device="cpu"):
    if kind == "tokens":
        return (torch.rand(B, T, generator=torch.Generator().manual_seed(1)) < 0.3).to(device)
    starts = torch.arange(T, device=device).expand(B, T)
    return {"runs": (starts // 9 + torch.arange(B, device=device)[:, None]) % 3 == 0}.get(
        kind, torch.full((B, T), kind == "attention", device=device)
    )


def functions(options, attends, K, *, row_ids=None, cu_seqlens=None, own_angles=False):
    B, T = attends.shape

    positions = torch.arange(T, device=attends.device)[None]
    if own_angles:
        positions = positions + torch.arange(B, device=attends.device)[:, None]
    rotation = RotaryEmbedding(K, {"rope_theta": 1e4}).to(attends.device)(positions)

    def run(impl, heads, recurrence="reference", **x):
        x |= dict(zip(("A_log", "dt_bias", "D"), heads, strict=False))
        form = {"attends": attends, "rotation": rotation, "row_ids": row_ids, "cu_seqlens": cu_seqlens}
        if recurrence == "triton":
            return Output(mix_reference(**{"D": None} | x | form, options=options, impl="triton"))
        return Output(mix(**x, **form, options=options, impl=impl))

    return (
        lambda **x: run("triton", **x),
        lambda **x: run("reference", **x),
        lambda **x: run(None, recurrence="triton", **x),
    )


def agree(functions, x):
    """Assert that errors of the fused kernels are at most twice those of single operations with the same recurrence.

    The baseline has the recurrence's kernels too, because their order of summation shows in gradients with only one
    value per head.
    """
    ours, exact, single = functions
    assert_agrees(ours, exact, x, baseline=single)


CHANGES = {
    "SiLU after the convolution": {"silu_shared": True},
    "SiLU on attention's queries": {"silu_attention_query": True},
    "SiLU on linear's queries": {"silu_linear_query": True},
    "attention alone rotated": {"rotate_linear": False},
    "gate after the norm": {"gate_before": False},
    "norm by head": {"groups": 3},
    "three heads": {},
}


def mixed(heads, impl=None, **x):
    """Call `mix` with A_log, dt_bias and D (None for the delta rule) as the rows of one tensor `heads`."""
    # parameters have separate memory
    apart = (x if x is None else x.clone() for x in heads)
    return mix(**{"D": None} | x | dict(zip(("A_log", "dt_bias", "D"), apart, strict=False)), impl=impl)


def z(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype)


class TestMix(OpContract):
    covers = (mix,)
    absent: ClassVar = {
        "parts": "a whole call of a layer, whose states are stored by the layer",
        "step": "a token is decoded mixer by mixer",
        "malformed_steps": "no steps",
    }
    forms: ClassVar = {"mix": mixed}
    # `rows` is not among these: it is a table of all queries, which `row_ids` indexes
    tokens = ("shared", "attends")
    shared = ("rows", "norm_weight", "k_weight", "v_weight", "heads")
    dtypes = ("float32",)
    cases: ClassVar = {
        "SSD": dict(T=9),
        "SSD, in the order of modes": dict(T=9, order=True, own_angles=True),
        "the delta rule": dict(T=9, options=DELTA, delta=True),
        **{change: dict(T=9, W=3, options=MAMBA2._replace(heads=3, **options)) for change, options in CHANGES.items()},
    }
    lengths = (1, 2, 63, 64, 65)
    kernels: ClassVar = {
        **{
            f"{family}, {form}": KernelCase(dict(options=options, K=K, delta=options is DELTA, kind="runs", **sizes))
            for family, options, K in (("SSD", MAMBA2, 16), ("the delta rule", DELTA, 64))
            for form, sizes in (
                ("whole", dict(own_angles=True)),
                ("sorted", dict(order=True)),
                ("packed", dict(order=True, boundaries=BORDERS)),
            )
        },
        **{kind: KernelCase(dict(T=24, kind=kind, order=True)) for kind in ("tokens", "attention", "linear")},
        # three heads, which are no power of two
        **{
            change: KernelCase(dict(B=1, T=24, W=3, options=MAMBA2._replace(heads=3, **options)))
            for change, options in CHANGES.items()
        },
    }
    packed: ClassVar = {
        "SSD": dict(K=4, boundaries=BORDERS),
        "the delta rule": dict(K=4, options=DELTA, delta=True, boundaries=BORDERS),
    }
    neighbours: ClassVar = dict(B=3, T=5)
    laid: ClassVar = {"in the order of modes": dict(B=1, T=5, order=True)}
    on_gpu: ClassVar = {"heads of 64": dict(T=70, K=64, kind="runs", order=True)}
    traced: ClassVar = dict(B=2, kind="runs", order=True)
    replayed: ClassVar = dict(B=1, T=6, K=64, options=DELTA, delta=True, kind="runs", order=True)
    valid: ClassVar = dict(B=1, T=8)
    malformed: ClassVar = {
        "columns that lack": (lambda x: x | {"shared": x["shared"][..., :-8]}, "at least 98 columns, got 95"),
        "weights of fewer channels": (
            lambda x: x | {"k_weight": x["k_weight"][1:]}, r"k_weight must have shape \[E, W\] with E=32"
        ),
        "modes that are integers": (lambda x: x | {"attends": x["attends"].long()}, "attends must be bool"),
        "no rates": (lambda x: x | {"heads": (x["heads"][0], None)}, "dt_bias must be a tensor .*, got None"),
        "mixed dtypes": (lambda x: x | {"rows": x["rows"].double()}, "must share one dtype"),
        "no angles": ({"rotation": None}, "rotation must be a Rotation of cos and sin, got NoneType"),
        "other heads": ({"options": MAMBA2._replace(heads=4)}, "expected 4 heads"),
        "groups that do not divide": ({"options": MAMBA2._replace(groups=5)}, "multiple of groups"),
    }  # fmt: skip

    def named(self, form, name):
        # error messages name A_log, the first row of `heads`
        return "A_log" if name == "heads" else name

    def make(
        self, dtype=torch.float64, device="cpu", seed=0, options=MAMBA2, B=2, T=40, K=16, W=4, kind="tokens",
        order=False, boundaries=None, own_angles=False, delta=False,
    ) -> Call:  # fmt: skip
        if boundaries is not None:
            B, T = 1, boundaries[-1]
        attends = modes(kind, B, T, device)
        positions = torch.arange(T, device=device)[None]
        if own_angles:
            positions = positions + torch.arange(B, device=device)[:, None]
        rotation = RotaryEmbedding(K, {"rope_theta": 1e4}).to(device)(positions)
        form = {"options": options, "attends": attends, "rotation": rotation}
        if order:
            form["row_ids"] = token_order(attends).rows
        if boundaries is not None:
            form["cu_seqlens"] = torch.tensor(boundaries, device=device)
        # if `rotate_linear` is set, `made` adds D, the skip weight of SSD; the delta rule has none
        x = made(options._replace(rotate_linear=not delta), B, T, K, dtype=dtype, device=device, W=W, seed=seed)
        if dtype == torch.float64:
            x["heads"] = x["heads"].double()
        return Call(x, form)

    def definition(
        self, rows, shared, norm_weight, k_weight, v_weight, heads, *, options, attends, rotation, row_ids=None
    ):
        (B, T), E, H = attends.shape, rows.shape[1], options.heads
        q = (rows if row_ids is None else rows[row_ids]).view(B, T, E)
        k, v, gate, rates, strength = shared[..., : 3 * E + 2 * H].split((E, E, E, H, H), -1)
        dt = (1 + (rates + heads[1]).exp()).log()

        def convolved(x, weight):
            W = weight.shape[1]
            x = torch.cat((x.new_zeros(B, W - 1, E), x), 1)
            x = sum(weight[:, i] * x[:, i : i + T] for i in range(W))
            return x * x.sigmoid() if options.silu_shared else x

        def rotated(x):
            cos, sin = (a.unsqueeze(2) for a in rotation)
            pairs = torch.complex(*x.chunk(2, -1)) * torch.complex(cos.double(), sin.double())
            return torch.cat((pairs.real, pairs.imag), -1)

        k, v, q, activated = (
            x.unflatten(-1, (H, -1)) for x in (convolved(k, k_weight), convolved(v, v_weight), q, q * q.sigmoid())
        )
        near = rotated(activated if options.silu_attention_query else q)
        far = activated if options.silu_linear_query else q
        keys, scale = rotated(k), k.shape[3] ** -0.5
        far, k = (rotated(far), keys) if options.rotate_linear else (far, k)
        if len(heads) < 3:
            far, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (far, k))
        S, outputs = v.new_zeros(B, H, k.shape[3], v.shape[3]), []
        for t in range(T):
            weights = (scale * torch.einsum("bhk,bjhk->bhj", near[:, t], keys[:, : t + 1])).softmax(2)
            attention = torch.einsum("bhj,bjhv->bhv", weights, v[:, : t + 1])
            kt, S = k[:, t].unsqueeze(3), (-heads[0].exp() * dt[:, t]).exp()[..., None, None] * S
            if len(heads) == 3:
                S = S + kt * (dt[:, t, :, None] * v[:, t]).unsqueeze(2)
                linear = torch.einsum("bhkv,bhk->bhv", S, far[:, t]) + heads[2][:, None] * v[:, t]
            else:
                S = S + kt * strength[:, t].sigmoid()[..., None, None] * (v[:, t].unsqueeze(2) - kt.mT @ S)
                linear = scale * torch.einsum("bhkv,bhk->bhv", S, far[:, t])
            outputs.append(torch.where(attends[:, t, None, None], attention, linear).flatten(1))
        o, opened = torch.stack(outputs, 1), gate * gate.sigmoid()
        parts = (o * opened if options.gate_before else o).unflatten(-1, (options.groups, -1))
        y = (parts / (parts.square().mean(-1, keepdim=True) + options.eps).sqrt()).flatten(-2) * norm_weight
        return y if options.gate_before else y * opened

    def growing(self, arguments):
        """Yield also `rows`, `row_ids` and the angles, each with its dimension of tokens."""
        yield from super().growing(arguments)
        yield arguments["rows"], 0
        yield arguments["row_ids"], 0
        yield from ((x, 1) for x in arguments["rotation"])

    def operators(self, device):
        from tokenmix_oryx.ops.mixing.autograd import Inputs, mix_backward_op, mix_op

        # leave out opcheck's AOT dispatch, because the contract's test of tracing covers it
        tests = "test_schema", "test_autograd_registration", "test_faketensor"
        for options, K in ((MAMBA2, 16), (DELTA, 64)):
            call = self.make(torch.float32, device, B=1, T=3, K=K, options=options, delta=options is DELTA, order=True)
            x = {name: t.requires_grad_() for name, t in call.tensors.items()}
            form, kind = call.options, options._asdict()
            del form["options"], kind["heads"]
            x |= {"D": None} | dict(zip(("A_log", "dt_bias", "D"), x.pop("heads"), strict=False))
            cos, sin = (angles[0] for angles in form.pop("rotation"))
            given = Inputs(**x, **form, **kind, cos=cos, sin=sin, cu_seqlens=None, impl="triton")
            yield mix_op, given, *tests
            with torch.no_grad():
                y, *kept = mix_op(*given)
            yield mix_backward_op, (*given, *kept, y), *tests

    def document(self, arguments, n, start, stop):
        """Return the arguments of one document, with its queries (in the order of tokens) and its angles."""
        rotation = Rotation(*(x[:, start:stop] for x in arguments["rotation"]))
        return super().document(arguments, n, start, stop) | {
            "rows": arguments["rows"][start:stop], "rotation": rotation
        }  # fmt: skip

    def assert_kernels_agree(self, kernels, reference, call):
        """Compare errors with those of single operations around the recurrence's kernels, as `agree` does."""
        form = {name: call.options.get(name) for name in ("row_ids", "cu_seqlens")}
        x, options = dict(call.tensors), call.options

        def single(heads, **x):
            x |= dict(zip(("A_log", "dt_bias", "D"), heads, strict=False)) | form
            x |= {name: options[name] for name in ("attends", "rotation", "options")}
            return Results(y=mix_reference(**{"D": None} | x, impl="triton"))

        assert_agrees(kernels, reference, x, baseline=single, floor=least)


def test_heads_are_padded_if_ssd_needs_it(device, monkeypatch):
    # pad heads as in float32 on a GPU
    monkeypatch.setattr("tokenmix_core.ops.ssd.autograd.needs_widening", lambda x, *sizes: min(sizes) < 64)
    attends = modes("runs", 2, 24, device)
    x = made(MAMBA2, 2, 24, 32, device=device)
    agree(functions(MAMBA2, attends, 32, row_ids=token_order(attends).rows), x)


def test_tensors_of_any_layout(device):
    attends = modes("runs", 1, 24, device)
    row_ids = token_order(attends).rows
    x = made(DELTA, 1, 24, 64, device=device)
    plain, *_ = functions(DELTA, attends, 64, row_ids=row_ids)
    strided, *_ = functions(
        DELTA, attends.repeat_interleave(2, 1)[:, ::2], 64, row_ids=row_ids.repeat_interleave(2)[::2]
    )
    apart = {name: t.repeat_interleave(2, -1)[..., ::2] for name, t in x.items()}
    assert torch.equal(plain(**x).y, strided(**apart).y)


@pytest.mark.parametrize("family", ["mamba2", "delta rule"])
def test_unwritten_memory_is_never_read(family, device, monkeypatch):
    options, K = (MAMBA2, 16) if family == "mamba2" else (DELTA, 64)
    # long enough that some tiles have no token in attention mode and, for Mamba-2, no tile of attention reads some rows
    T = 170 if family == "mamba2" else 70
    attends = torch.zeros(1, T, dtype=torch.bool, device=device)
    attends[:, 5:8] = True
    x = made(options._replace(heads=1), 1, T, K, device=device)
    ours, *_ = functions(options._replace(heads=1, groups=1), attends, K)
    leaves = {name: t.requires_grad_() for name, t in x.items()}
    whole = torch.autograd.grad(ours(**leaves).y.sum(), list(leaves.values()))
    for name in ("empty", "empty_like"):
        make = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *a, _make=make, **k: _poisoned(_make(*a, **k)))
    new = Tensor.new_empty
    monkeypatch.setattr(Tensor, "new_empty", lambda *a, **k: _poisoned(new(*a, **k)))
    poisoned = torch.autograd.grad(ours(**leaves).y.sum(), list(leaves.values()))
    assert all(torch.equal(a, b) for a, b in zip(whole, poisoned, strict=True))


def _poisoned(x: Tensor) -> Tensor:
    return x.fill_(float("nan")) if x.is_floating_point() else x


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("family", ["mamba2", "delta rule"])
@pytest.mark.parametrize("kind", ["tokens", "runs", "attention", "linear"])
def test_kernels_on_a_gpu(family, kind, dtype):
    # 16 heads: gradients with one value per head then have enough values for a comparison of errors
    options = (MAMBA2 if family == "mamba2" else DELTA)._replace(heads=16, groups=1 if family == "mamba2" else 16)
    attends = modes(kind, 2, 700, "cuda")
    x = made(options, 2, 700, 128, dtype, "cuda")
    agree(functions(options, attends, 128, row_ids=token_order(attends).rows), x)


@pytest.mark.parametrize("family", ["mamba2", "delta rule"])
def test_compiled_and_checkpointed_calls_are_equal(family, device):
    options, K = (MAMBA2, 16) if family == "mamba2" else (DELTA, 64)
    attends = modes("runs", 1, 20, device)
    ours, *_ = functions(options, attends, K, row_ids=token_order(attends).rows)
    leaves = {name: t.requires_grad_() for name, t in made(options, 1, 20, K, device=device).items()}
    found = []
    recomputed = partial(checkpoint, ours, use_reentrant=False)
    for run in (ours, recomputed, torch.compile(ours, backend="aot_eager", fullgraph=True)):
        y = run(**leaves).y
        found.append((y, *torch.autograd.grad(y.sum(), list(leaves.values()))))
    for first, *others in zip(*found, strict=True):
        assert all(torch.equal(first, x) for x in others)


@pytest.mark.gpu
@pytest.mark.parametrize("K", [16, 32])
def test_small_heads_in_float32_on_a_gpu(K):
    options = MAMBA2._replace(heads=16)
    attends = modes("runs", 2, 300, "cuda")
    x = made(options, 2, 300, K, torch.float32, "cuda")
    agree(functions(options, attends, K, row_ids=token_order(attends).rows), x)
