"""Where the time of a training step goes, and how near its floor it is: `python step.py RECIPE... [options]`.

A step is forward, backward, clipping and fused AdamW, with float32 weights under bfloat16 autocast, as recipes train.
Models named by recipe (of core, or `tokenmix_nats_l.recipes:gdn-380m`) run eagerly and compiled, beside FLA's and
transformers' models of the same sizes where these are installed; all stay in memory and take turns. For each: thousand
tokens a second, peak GiB, milliseconds of device time by kind of kernel, and the share of the floor.

**The floor** is a model, not a measurement: what a step cannot take less than, part by part, on one chip.

- products: 6 operations a weight of every linear layer and token, the output layer included, at the chip's rate.
- mixing: three times the mixers' operations of a forward pass, at the same rate.
- activations: what lies between products, of 2 bytes a number. Forward, the outputs of products are read and their
  inputs written once; backward, the outputs are read again, gradients of inputs read, and gradients of outputs written.
  The residual stream, of 4 bytes, is read and written at each norm, and read twice and written once backward.
- loss: logits written, read, and written as gradients, which two products read.
- weights: each read in 4 bytes and written in 2, its gradient read in 2 and written in 4; AdamW and clipping 32 bytes.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import importlib.util
import re
import statistics
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tokenmix_core.testing.benchmarking import table
from tokenmix_core.testing.results import save

DEFAULT = ("gated_delta_net-380m", "transformer-380m")
RESULTS = Path(__file__).parent / "results" / "step"

# by kind, what names of kernels have; the first that fits
KINDS = {
    "products": r"gemm|cutlass|nvjet|xmma|cublas|splitK",
    "attention": r"flash|fmha|cudnn.*sdpa|attention",
    "delta rule, scans": r"gated_delta|delta_rule|chunk_|prepare_|segment_|entering_|ssd|slot_window|recurrent",
    "convolutions": r"conv",
    "norms": r"norm|rstd",
    "rotation": r"rotate|rotary|rope",
    "SwiGLU": r"swiglu",
    "gates": r"delta_gates|softplus|sigmoid",
    "loss": r"softmax|nll|cross_entropy",
    "optimizer": r"adam|multi_tensor|foreach",
    "compiled": r"triton_(poi|red|per|tem|for)",
    "copies between dtypes": r"direct_copy|copy_kernel|_to_copy",
    "copies": r"memcpy|memset|CatArray|copy|fill",
    "sums": r"reduce|CUDAFunctor_add|AddFunctor",
    "products by element": r"MulFunctor|mul",
    "activations": r"silu|gelu|sigmoid",
}
# layers whose inputs are read by no other layer
OWN_INPUTS = ("o_proj", "out_proj", "down_proj")


class Chip(NamedTuple):
    """Operations and bytes a second that a chip was seen to reach."""

    flops: float
    bytes: float


H200 = Chip(790e12, 4.27e12)


def floor(model: Any, rows: int, length: int, chip: Chip = H200) -> dict[str, float]:
    """Milliseconds of a step's parts that no kernel can undercut, by the module's table; and their sum, "all"."""
    tokens = rows * length
    backbone, head = model.model, model.lm_head.weight
    weights, vocab, width = sum(p.numel() for p in model.parameters()), *head.shape
    linear = sum(m.weight.numel() for m in backbone.modules() if isinstance(m, nn.Linear)) + head.numel()
    mixing = sum(mixer.mixing_flops(length) for mixer in backbone.mixers)
    between, norms = 0, 1
    for block in backbone.layers:
        # what each norm writes, by as many layers as read it
        norms += 1 if block.mlp is None else 2
        for name, layer in block.named_modules():
            if isinstance(layer, nn.Linear):
                own = layer.in_features if name.rpartition(".")[2] in OWN_INPUTS else 0
                between += 2 * own + 3 * layer.out_features
    between += 2 * width * norms
    seconds = {
        "products": 6 * linear * tokens / chip.flops,
        "mixing": 3 * mixing * tokens / chip.flops,
        "activations": tokens * (2 * between + 4 * 5 * width * norms) / chip.bytes,
        "loss": tokens * vocab * 2 * 5 / chip.bytes,
        "weights": weights * (6 + 6 + 32) / chip.bytes,
    }
    found = {part: 1e3 * x for part, x in seconds.items()}
    return found | {"all": sum(found.values())}


def kept_bytes(model: Any, ids: Tensor) -> int:
    """Bytes that a forward pass keeps for its backward pass, each storage once, without parameters."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def note(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return x

    # everything stays alive until the end, so that no address is used twice
    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x), autocast(ids.device):
        loss = model(ids, labels=ids).loss
    del loss
    return sum(kept.values())


def autocast(device: torch.device) -> Any:
    """As recipes train on a GPU; nothing on a CPU."""
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext()


class Training:
    """A model that takes steps.

    Attributes:
        model: the model itself, where its loss is compiled, too.
        resident: bytes of weights, gradients and the optimizer's state.
        first: seconds of the first step.
    """

    def __init__(self, make: Callable[[], nn.Module], device: torch.device, compiled: bool) -> None:
        self.device = device
        before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
        torch.manual_seed(0)
        self.model = make().to(device).train()
        if hasattr(self.model.config, "use_cache"):
            self.model.config.use_cache = False
        self.run = torch.compile(self.model) if compiled else self.model
        cuda = device.type == "cuda"
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, betas=(0.9, 0.95), fused=cuda or None)
        self._before, self.resident, self.first, self.peak = before, 0, 0.0, 0

    def step(self, ids: Tensor) -> Tensor:
        """Forward, backward, clipping, AdamW."""
        with autocast(self.device):
            loss = self.run(ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def warm(self, ids: Tensor, steps: int) -> list[float]:
        """The first steps, whose losses are returned."""
        start = time.perf_counter()
        losses = [float(self.step(ids))]
        self.first = time.perf_counter() - start
        losses += [float(self.step(ids)) for _ in range(steps)]
        if self.device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()
            self.resident = torch.cuda.memory_allocated() - self._before
        return losses

    def time(self, ids: Tensor, steps: int) -> float:
        """Milliseconds a step, mean over `steps` steps between two events."""
        if self.device.type != "cuda":
            start = time.perf_counter()
            for _ in range(steps):
                self.step(ids)
            return (time.perf_counter() - start) * 1e3 / steps
        others = torch.cuda.memory_allocated() - self.resident
        torch.cuda.reset_peak_memory_stats()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(steps):
            self.step(ids)
        end.record()
        end.synchronize()
        self.peak = max(self.peak, torch.cuda.max_memory_allocated() - others)
        return begin.elapsed_time(end) / steps

    def profile(self, ids: Tensor, steps: int = 3) -> dict[str, float]:
        """Milliseconds of device time a step by kind of kernel, the largest first; empty on a CPU."""
        if self.device.type != "cuda":
            return {}
        from torch.autograd import DeviceType
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
            for _ in range(steps):
                self.step(ids)
            torch.cuda.synchronize()
        times: dict[str, float] = {}
        for event in seen.events():
            # ranges that somebody named span kernels, which would count twice
            if event.device_type == DeviceType.CUDA and not getattr(event, "is_user_annotation", False):
                kind = kind_of(event.name)
                times[kind] = times.get(kind, 0.0) + event.time_range.elapsed_us() / 1e3 / steps
        return dict(sorted(times.items(), key=lambda item: -item[1]))


def kind_of(kernel: str) -> str:
    """The kind of a kernel by its name."""
    return next((kind for kind, names in KINDS.items() if re.search(names, kernel, re.IGNORECASE)), "others")


def recipe_named(name: str) -> Any:
    """A recipe of core by name, or `module:name` of another package's."""
    module, _, recipe = name.rpartition(":")
    recipes = importlib.import_module(module or "tokenmix_core.recipes").RECIPES
    if recipe not in recipes:
        raise ValueError(f"step.py: no recipe {recipe!r} in {module or 'tokenmix_core.recipes'}")
    return recipes[recipe]()


def models(recipe: Any) -> dict[str, tuple[Callable[[], nn.Module], bool]]:
    """By name, how a model is made and whether it is compiled: the recipe's own, then peers of its sizes."""
    from transformers import AutoModelForCausalLM

    config = recipe.model_config()
    made: dict[str, tuple[Callable[[], nn.Module], bool]] = {
        f"tokenmix {form}": (lambda: AutoModelForCausalLM.from_config(config), form == "compiled")
        for form in ("eager", "compiled")
    }
    mixers = {config.mixer_type(i) for i in range(config.num_hidden_layers)} if hasattr(config, "mixer_type") else set()
    if mixers == {"attention"}:
        heads = config.options_of(0)["num_heads"]
        for form in ("eager", "compiled"):
            made[f"transformers Llama {form}"] = (lambda: _llama(config, heads), form == "compiled")
    if importlib.util.find_spec("fla") is not None and len(mixers) == 1 and mixers <= {"attention", "gated_delta_net"}:
        made["FLA eager"] = (lambda: _fla(config), False)
    return made


def _sizes(config: Any) -> dict[str, Any]:
    fields = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "tie_word_embeddings")
    return {name: getattr(config, name) for name in (*fields, "max_position_embeddings")}


def _llama(config: Any, heads: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**_sizes(config), num_attention_heads=heads, num_key_value_heads=heads))


def _fla(config: Any) -> nn.Module:
    from fla.models import (  # type: ignore[import-not-found]
        GatedDeltaNetConfig,
        GatedDeltaNetForCausalLM,
        TransformerConfig,
        TransformerForCausalLM,
    )

    options = config.options_of(0)
    if config.mixer_type(0) == "attention":
        return TransformerForCausalLM(TransformerConfig(**_sizes(config), num_heads=options["num_heads"]))
    names = ("num_heads", "head_dim", "expand_v")
    return GatedDeltaNetForCausalLM(GatedDeltaNetConfig(**_sizes(config), **{name: options[name] for name in names}))


def measure(
    names: Iterable[str], *, rows: int, length: int, device: str, steps: int = 10, rounds: int = 5, warmup: int = 3
) -> list[dict]:
    """Rows of the JSON: every model of every recipe, all in memory, `steps` steps at a time in turns.

    A model that fails is left out, with a line that says why.
    """
    where = torch.device(device)
    trained: dict[tuple[str, str], tuple[Training, Tensor, list[float]]] = {}
    floors: dict[str, dict[str, float]] = {}
    kept: dict[str, float] = {}
    for name in names:
        recipe = recipe_named(name)
        ids = torch.randint(0, recipe.model_config().vocab_size, (rows, length), device=where)
        for impl, (make, compiled) in models(recipe).items():
            try:
                training = Training(make, where, compiled)
                losses = training.warm(ids, warmup)
            # peers and compilers fail in errors of their own
            except Exception as error:
                print(f"{impl} does not run {name}: {type(error).__name__}: {str(error)[:300]}")
                continue
            trained[name, impl] = training, ids, losses
            if name not in floors:
                floors[name] = floor(training.model, rows, length)
                kept[name] = kept_bytes(training.model, ids) / 2**30
    times: dict[tuple[str, str], list[float]] = {key: [] for key in trained}
    for _ in range(rounds):
        for key, (training, ids, _) in trained.items():
            times[key].append(training.time(ids, steps))
    found = []
    for (name, impl), (training, ids, losses) in trained.items():
        ms = statistics.median(times[name, impl])
        found.append(
            {
                "op": f"training step, {name}",
                "shape": f"B{rows} T{length}",
                "impl": impl,
                "step_ms": ms,
                "thousand_tokens_s": rows * length / ms,
                "peak_gib": training.peak / 2**30 if where.type == "cuda" else None,
                "kept_gib": kept[name] if impl == "tokenmix eager" else None,
                "first_step_s": training.first,
                "floor_ms": floors[name]["all"],
                "share_of_floor": floors[name]["all"] / ms,
                "floor": floors[name],
                "kinds_ms": training.profile(ids),
                "losses": losses,
            }
        )
    return found


def report(found: list[dict]) -> str:
    """The rows as text, then the floor's parts and kernels by kind."""
    told = ("op", "impl", "step_ms", "thousand_tokens_s", "peak_gib", "kept_gib", "first_step_s", "share_of_floor")
    lines = [table([{key: row[key] for key in told} for row in found])] if found else ["nothing ran"]
    for row in found:
        for title, parts in (("floor", row["floor"]), ("kernels", row["kinds_ms"])):
            if parts and (title == "kernels" or row["impl"].endswith("tokenmix eager")):
                parts = ", ".join(f"{part} {ms:.2f}" for part, ms in parts.items())
                lines.append(f"{row['op']}, {row['impl']}, {title}, ms: {parts}")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> list[dict]:
    """Measure, print, and keep what a GPU gave."""
    parser = argparse.ArgumentParser(description="measure training steps beside their floor and their peers")
    parser.add_argument("recipes", nargs="*", default=list(DEFAULT), help="of core, or module:name")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=10, help="of a turn")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each model")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help=f"folder of the JSON; for a GPU {RESULTS.name}/ beside the others")
    given = parser.parse_args(arguments)
    found = measure(
        given.recipes,
        rows=given.rows,
        length=given.length,
        device=given.device,
        steps=given.steps,
        rounds=given.rounds,
    )
    print(report(found))
    folder = given.out or (RESULTS if given.device != "cpu" else None)
    if folder is not None and found:
        print(f"kept in {save(found, folder)}")
    return found


if __name__ == "__main__":
    main()
