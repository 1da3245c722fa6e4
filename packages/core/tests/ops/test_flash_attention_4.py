"""Test calls of FlashAttention-4 and their results, by an emulator with its parameters that computes the reference."""

from __future__ import annotations

import ast
import importlib.metadata
import sys
import types

import pytest
import torch

from tokenmix_core.chunking import cu_seqlens_from_lengths
from tokenmix_core.ops.softmax_attention import attention_reference, backends, flash4
from tokenmix_core.ops.softmax_attention.backends import backward_impl, choose_impl, limit
from tokenmix_core.ops.softmax_attention.implementations import load
from tokenmix_core.ops.softmax_attention.reference import attention_reference_backward
from tokenmix_core.ops.softmax_attention.types import Call, Mask

# fmt: off
FORWARD = [
    "q", "k", "v", "qv", "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "max_seqlen_q", "max_seqlen_k",
    "min_seqlen_k", "page_table", "softmax_scale", "causal", "softcap", "window_size_left", "window_size_right",
    "learnable_sink", "tile_mn", "mma_pv_is_rs", "intra_wg_overlap", "num_threads", "num_splits", "pack_gqa", "_arch",
    "score_mod", "mask_mod", "block_sparse_tensors", "return_lse",
]
BACKWARD = [
    "q", "k", "v", "out", "dout", "lse", "softmax_scale", "causal", "softcap", "window_size_left", "window_size_right",
    "m_block_size", "n_block_size", "num_threads", "pack_gqa", "num_stages_Q", "num_stages_dO", "SdP_swapAB",
    "dKV_swapAB", "dQ_swapAB", "AtomLayoutMSdP", "AtomLayoutNdKV", "AtomLayoutMdQ", "V_in_regs", "cu_seqlens_q",
    "cu_seqlens_k", "seqused_q", "seqused_k", "max_seqlen_q", "max_seqlen_k", "deterministic", "dq", "dk", "dv",
    "score_mod", "score_mod_bwd", "mask_mod", "aux_tensors", "aux_scalars", "block_sparse_tensors", "dlse",
]
# fmt: on
CASES = {
    "causal": {},
    "bidirectional, ragged": dict(TQ=33, TK=70, mask=Mask(False, None, 0)),
    "window, grouped heads": dict(B=2, HQ=4, H=2, mask=Mask(True, 20, 0)),
    "fewer queries": dict(TQ=7, TK=40, mask=Mask(True, 11, 0)),
    "packed": dict(mask=Mask(True, None, 0), lengths=[0, 1, 15, 34]),
    "packed, window, grouped heads": dict(HQ=4, H=1, mask=Mask(True, 5, 0), lengths=[30, 0, 20]),
}


class Library:
    """Emulates flash_attn.cute.interface and its requirements; stores the last call's arguments."""

    def __init__(self):
        self.said: dict = {}
        self._flash_attn_fwd = self._with_parameters(FORWARD, self._forward)
        self._flash_attn_bwd = self._with_parameters(BACKWARD, self._backward)

    def _with_parameters(self, names, function):
        scope: dict = {"function": function}
        exec(f"def call({', '.join(f'{name}=None' for name in names)}): return function(**locals())", scope)
        return scope["call"]

    def _form(self, x):
        """Return the reference's arguments, converted from the library's names, layouts and conventions."""
        self.said = x
        cu = x["cu_seqlens_q"]
        assert cu is x["cu_seqlens_k"]
        assert all(t.dim() == (4 if cu is None else 3) for t in (x["q"], x["k"], x["v"]))
        assert cu is None or cu.dtype == torch.int32
        assert all(x[name] is None for name in ("softcap", "pack_gqa", "score_mod", "mask_mod", "max_seqlen_q"))
        causal, left, right = x["causal"], x["window_size_left"], x["window_size_right"]
        # the last query is at the last key; in a causal call a query sees no key to its right
        assert right == (0 if causal else None)
        assert left is None or causal
        window = None if left is None else left + 1
        return dict(causal=causal, window=window, sinks=0, scale=x["softmax_scale"], cu_seqlens=cu)

    @staticmethod
    def _batched(form, *tensors):
        return [t if form["cu_seqlens"] is None else t.unsqueeze(0) for t in tensors]

    def _forward(self, **x):
        form = self._form(x)
        assert x["return_lse"] is True
        o, lse = attention_reference(*self._batched(form, x["q"], x["k"], x["v"]), **form)
        lse = lse.transpose(1, 2).contiguous()
        return (o, lse, None, None, None) if form["cu_seqlens"] is None else (o[0], lse[0], None, None, None)

    def _backward(self, **x):
        form = self._form(x)
        assert x["out"].shape == x["dout"].shape
        q, k, v, o, do = self._batched(form, *(x[name] for name in ("q", "k", "v", "out", "dout")))
        # heads before time, as the log-sum-exp
        assert x["lse"].shape == (*x["out"].shape[:-3], x["out"].shape[-2], x["out"].shape[-3])
        dlse = x["dlse"]
        if dlse is not None:
            assert dlse.shape == x["lse"].shape
            dlse = self._batched(form, dlse)[0].transpose(1, 2)
        grads = attention_reference_backward(q, k, v, o, do, dlse, **form)
        for name, grad in zip(("dq", "dk", "dv"), grads, strict=True):
            assert x[name].is_contiguous()
            x[name].copy_(grad.view_as(x[name]))


@pytest.fixture
def library(monkeypatch):
    library = Library()
    for name in ("flash_attn", "flash_attn.cute"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setattr(sys.modules["flash_attn.cute"], "interface", library, raising=False)
    return library


@pytest.mark.parametrize("through_lse", [False, True], ids=["o alone", "o and lse"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_arguments_and_results_mean_what_they_do_here(library, case, through_lse):
    case = {"B": 1, "TQ": 50, "HQ": 2, "H": 2, "mask": Mask(True, None, 0), "lengths": None} | case
    B, TQ, HQ, H, mask = (case[name] for name in ("B", "TQ", "HQ", "H", "mask"))
    TK = case.get("TK", TQ)
    cu = None if case["lengths"] is None else cu_seqlens_from_lengths(torch.tensor(case["lengths"]))
    generator = torch.Generator().manual_seed(0)
    # heads lie beside others, which the library reads as they are
    wide = [torch.randn(B, T, heads, 32, generator=generator) for T, heads in ((TQ, HQ), (TK, H), (TK, H), (TQ, HQ))]
    q, k, v, do = (x[..., :16] for x in wide)
    form = dict(scale=0.3, cu_seqlens=cu, **mask._asdict())
    exact = attention_reference(q, k, v, **form)
    o, lse = flash4.forward(q, k, v, cu, mask, 0.3)
    torch.testing.assert_close(o, exact.o)
    torch.testing.assert_close(lse, exact.lse.transpose(1, 2))
    assert library.said["q"].data_ptr() == q.data_ptr()
    dlse = torch.randn(lse.shape, generator=generator) if through_lse else None
    grads = flash4.backward(q, k, v, o.contiguous(), lse.contiguous(), do, dlse, cu, mask, 0.3)
    dlse = None if dlse is None else dlse.transpose(1, 2)
    for got, wanted in zip(grads, attention_reference_backward(q, k, v, o, do, dlse, **form), strict=True):
        torch.testing.assert_close(got, wanted)
    assert (library.said["dlse"] is not None) == through_lse


@pytest.mark.parametrize("asked", [False, True])
def test_sums_are_in_one_order_where_torch_is_asked_for_it(library, monkeypatch, asked):
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: asked)
    q = torch.randn(1, 8, 1, 16)
    o, lse = flash4.forward(q, q, q, None, Mask(True, None, 0), 0.25)
    flash4.backward(q, q, q, o, lse, o, None, None, Mask(True, None, 0), 0.25)
    assert library.said["deterministic"] is asked


def test_the_emulator_has_the_librarys_parameters():
    try:
        files = importlib.metadata.files("flash-attn-4") or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("flash-attn-4 is not installed")
    (path,) = (x for x in files if x.as_posix() == "flash_attn/cute/interface.py")
    tree = ast.parse(path.locate().read_text())
    found = {x.name: [a.arg for a in x.args.args] for x in tree.body if isinstance(x, ast.FunctionDef)}
    for name, ours in (("_flash_attn_fwd", FORWARD), ("_flash_attn_bwd", BACKWARD)):
        assert found[name][: len(ours)] == ours


@pytest.mark.parametrize("lacking", [None, "dlse"])
def test_a_package_is_used_if_it_has_what_is_called(library, monkeypatch, recwarn, lacking):
    if lacking is not None:
        parameters = [name for name in BACKWARD if name != lacking]
        library._flash_attn_bwd = library._with_parameters(parameters, library._backward)
    monkeypatch.setattr(flash4, "version", lambda package: "4.0.0")
    assert flash4.is_here.__wrapped__() == (lacking is None)
    said = [str(x.message) for x in recwarn]
    assert said == ([] if lacking is None else [
        "attention: flash-attn-4 4.0.0 is installed but not used: it has no _flash_attn_bwd(dlse)"
    ])  # fmt: skip


def test_the_copy_in_flash_attn_2_is_not_used(library, monkeypatch):
    def missing(package):
        raise importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(flash4, "version", missing)
    assert not flash4.is_here.__wrapped__()


@pytest.fixture
def hopper(monkeypatch):
    """Simulate a machine with Hopper GPUs and the package."""
    for name, answer in (("on_hopper", True), ("flash_attention", 4), ("cudnn_heads", 256)):
        monkeypatch.setattr(backends, name, lambda answer=answer: answer)


def call(dtype=torch.bfloat16, tq=4096, tk=4096, k=128, v=128, packed=False, heads=128, own=True, gluon=True, **mask):
    mask = Mask(**{**Mask(True, None, 0)._asdict(), **mask})
    return Call("cuda", dtype, tq, tk, k, v, mask, packed, heads if own else None, heads, gluon)


def test_it_is_chosen_where_it_was_seen_to_lead(hopper):
    leads = (call(), call(causal=False), call(window=1024), call(packed=True))
    assert {choose_impl(x) for x in leads} == {backward_impl(None, x, True) for x in leads} == {"flash_attn"}
    # FlashAttention-4 only runs the backward pass
    half = (call(k=64, v=64, own=False), call(k=64, v=64, causal=False))
    assert {choose_impl(x) for x in half} == {"triton"}
    assert {backward_impl(None, x, False) for x in half} == {"flash_attn"}
    assert choose_impl(call(heads=16, gluon=False)) == choose_impl(call(k=96, v=96, gluon=False)) == "sdpa"
    ours = (call(window=512), call(window=1024, sinks=4), call(window=1024, tq=128), call(window=1024, packed=True))
    ours += (call(window=1024, k=64, v=64), call(k=64, v=64, packed=True))
    ours += (call(dtype=torch.float32, gluon=False),)
    assert {choose_impl(x) for x in ours} == {"triton"}
    assert {backward_impl(None, x, False) for x in ours} == {None}


def test_what_it_cannot_do_is_said(hopper, monkeypatch):
    assert limit("flash_attn", call()) is None
    for other, said in (
        (call(dtype=torch.float32), "takes bfloat16 and float16, got float32"),
        (call(window=64, sinks=1), "no sinks"),
        (call(k=320, v=320), "up to 256, got K=320"),
        (call(v=64), "needs K = V"),
        (call(tq=5000), "at least as many keys as queries"),
    ):
        assert said in (limit("flash_attn", other) or "")
    assert limit("flash_attn", call(k=192, v=192)) is None
    monkeypatch.setattr(backends, "on_hopper", lambda: False)
    assert "up to 128, or of 256, on this device, got K=192" in (limit("flash_attn", call(k=192, v=192)) or "")


def test_its_own_gradients_carry_those_of_the_log_sum_exp(monkeypatch):
    for version, through_lse, whose in ((4, True, "flash_attn"), (2, True, None), (2, False, "flash_attn")):
        monkeypatch.setattr(backends, "flash_attention", lambda version=version: version)
        assert backward_impl("flash_attn", call(), through_lse) == whose
        assert load("flash_attn").forward.__module__.endswith("flash4" if version == 4 else "flash")


def test_the_choice_can_be_traced():
    @torch.compile(backend="eager", fullgraph=True)
    def traced(x):
        return x + backends.flash_attention() + backends.on_hopper()

    assert traced(torch.zeros(())) == backends.flash_attention() + backends.on_hopper()
