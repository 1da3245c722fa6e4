"""Test that the benchmark of training steps runs on a CPU, and that its floor counts what it states."""

from __future__ import annotations

import json
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

from tokenmix_core.modeling import HybridConfig, HybridForCausalLM
from tokenmix_core.testing.fake_cuda_graph import graphs_everywhere

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
SCRIPT, FLOOR = (runpy.run_path(str(BENCHMARKS / name)) for name in ("step.py", "step_floor.py"))


TINY = ["--device", "cpu", "--rows", "1", "--length", "32", "--steps", "1", "--rounds", "1"]


def test_a_step_is_measured_beside_its_floor(tmp_path, capsys):
    # measure only the eager form, because compilers take long on a CPU
    (row,) = SCRIPT["main"](["tiny-gdn", "--only", "tokenmix eager", *TINY, "--out", str(tmp_path)])
    assert row["impl"] == "tokenmix eager"
    assert row["rounds"] == 1
    assert row["thousand_tokens_s"] == pytest.approx(32 / row["step_ms"])
    assert 0 < row["share_of_floor"] < 1
    assert row["first_step_s"] > 0
    assert row["losses"][-1] < row["losses"][0]
    assert row["kept_gib"] > 0
    (kept,) = json.loads(next(tmp_path.glob("*.json")).read_text())
    assert kept["op"] == "training step, tiny-gdn"
    out, told = capsys.readouterr()
    assert "activations" in out
    assert "warming tiny-gdn, tokenmix eager" in told


def test_a_graph_s_steps_lose_what_eager_ones_lose(tmp_path):
    with graphs_everywhere(eager=True):
        eager, graph = SCRIPT["main"](["tiny-gdn", "--only", "eager", "--only", "graph", *TINY])
    assert (eager["impl"], graph["impl"]) == ("tokenmix eager", "tokenmix graph")
    assert graph["losses"] == eager["losses"]


def test_a_measurement_that_is_cut_off_leaves_what_it_found(tmp_path, capsys, monkeypatch):
    def cut_off(line: str) -> None:
        if line.startswith("2 of"):
            raise KeyboardInterrupt

    monkeypatch.setitem(SCRIPT["measure"].__globals__, "say", cut_off)
    with pytest.raises(KeyboardInterrupt):
        SCRIPT["main"](["tiny-gdn", "tiny-gdn", "--only", "eager", "--only", "tokenmix", *TINY, "--out", str(tmp_path)])
    (kept,) = json.loads(next(tmp_path.glob("*.json")).read_text())
    assert (kept["impl"], kept["rounds"]) == ("tokenmix eager", 0)
    assert "tokenmix eager" in capsys.readouterr().out


def test_models_are_chosen_by_name_and_ours_come_first():
    def names(*only: str) -> list[str]:
        return [impl for _, impl, _, _ in SCRIPT["chosen"](["tiny-transformer", "tiny-gdn"], only)]

    assert names("Tokenmix") == ["tokenmix eager", "tokenmix graph", "tokenmix compiled"] * 2
    assert names("transformers", "tokenmix eager") == ["tokenmix eager"] * 2 + [
        "transformers Llama eager",
        "transformers Llama compiled",
    ]
    with pytest.raises(ValueError, match="'Mixtral' is in the name of no model, there is tokenmix eager"):
        names("Mixtral")


def test_the_floor_counts_products_weights_and_the_loss():
    sizes = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48}
    options = {"mixers": ["attention"], "mixer_options": {"attention": {"num_heads": 2}}, "tie_word_embeddings": False}
    with torch.device("meta"):
        model = HybridForCausalLM(HybridConfig(**sizes, **options))
    floor = FLOOR["floor"](model, 3, 5, FLOOR["Chip"](1e3, 1e3))
    linear = 2 * (4 * 32 * 32 + 3 * 32 * 48) + 61 * 32
    assert floor["products"] == 6 * linear * 15
    assert floor["loss"] == 15 * 61 * 2 * 5
    assert floor["weights"] == 44 * (linear + 61 * 32 + 5 * 32)
    assert floor["mixing"] == 3 * 2 * 4 * 32 * 3 * 15
    # outputs three times: q, k, v, o, gate, up, down; own inputs of o and down twice; five norms
    numbers = 2 * (3 * (4 * 32 + 2 * 48 + 32) + 2 * (32 + 48)) + 2 * 32 * 5
    assert floor["activations"] == 15 * (2 * numbers + 20 * 32 * 5)
    assert floor["all"] == sum(ms for part, ms in floor.items() if part != "all")


def test_a_step_s_products_and_operations_count_as_they_ran():
    floor = dict.fromkeys(("products", "mixing"), 100.0) | {"activations": 4.0, "loss": 2.0, "weights": 1.0}
    kinds = {"products": 30.0, "attention": 10.0, "convolutions": 5.0, "norms": 50.0, "others": 50.0}
    assert FLOOR["as_run"](floor, kinds) == 30 + 10 + 5 + 4 + 2 + 1


@pytest.mark.parametrize(
    "operation", ["ssd", "gated_delta_rule", "causal_conv1d", "softmax_attention", "sparse_attention"]
)
def test_every_kernel_of_an_operation_counts_for_it(operation):
    launched = r"@cached_launch\n@(?:triton|gluon)\.jit(?:\([^)]*\))?\ndef (\w+)\("
    sources = (Path(__file__).parents[2] / "src" / "tokenmix_core" / "ops" / operation).rglob("*.py")
    names = {name for source in sources for name in re.findall(launched, source.read_text())}
    assert names
    assert {FLOOR["kind_of"](name) for name in names} <= set(FLOOR["OPERATIONS"])


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT", "products"),
        ("void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda", "copies between dtypes"),
        ("rms_norm_backward_kernel", "norms"),
        ("swiglu_backward_kernel", "SwiGLU"),
        ("short_convs_forward_kernel", "convolutions"),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp", "sums"),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel", "optimizer"),
        ("hopper_scorer_kernel", "scorer"),
        ("hopper_slot_states_kernel", "delta rule, scans"),
        ("backward_scan_kernel", "delta rule, scans"),
        ("_kept_attention_forward", "attention"),
        ("what nobody knows", "others"),
    ],
)
def test_kernels_are_told_apart_by_name(kernel, kind):
    assert FLOOR["kind_of"](kernel) == kind
