"""Tests of sequences that are split over ranks: values and gradients must equal those of a single process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from tokenmix_core import parallel
from tokenmix_core.parallel import SequenceShard, gather_rows, overlap

# maximum error in float64, relative to the largest element
TOLERANCE = 1e-12


class Layout(NamedTuple):
    """A batch (number of rows, tokens per row, document boundaries) and its layout over ranks: contiguous or zigzag."""

    layout: str
    batch: int
    tokens: int
    boundaries: list[int] | None = None


def layouts(size: int) -> list[Layout]:
    """Return batches for `size` ranks, of rows and of packed documents, in both layouts, with odd span lengths.

    Documents end inside spans and at the ends of spans, and fill several spans; some are empty or have one token.
    """
    found = []
    for layout, parts in (("contiguous", size), ("zigzag", 2 * size)):
        span = 35 if layout == "contiguous" else 19
        tokens = parts * span
        found.append(Layout(layout, 2, tokens))
        found.append(Layout(layout, 1, tokens, [0, 5, 5, span - 1, span, span + 1, tokens - 3, tokens]))
        found.append(Layout(layout, 1, tokens, [0, 0, span + 7, span + 8, tokens - 5, tokens]))
    return found


class Case(NamedTuple):
    """An operation to test, with its inputs.

    Attributes:
        inputs: takes (batch, tokens, sequences); returns the inputs `[B, T, ...]`, which are split, and the inputs that
            all ranks get whole.
        run: takes (inputs, others, options); returns the outputs `[B, T, ...]`, which are split, and the outputs that
            are equal on all ranks.
    """

    inputs: Callable[[int, int, int], tuple[dict[str, Tensor], dict[str, Tensor]]]
    run: Callable[..., tuple[dict[str, Tensor], dict[str, Tensor]]]


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def _recurrent_inputs(batch: int, tokens: int, sequences: int, *, delta: bool, heads: int = 2) -> tuple[dict, dict]:
    K, V = (6, 5) if delta else (4, 6)
    split = {
        "q": _random(batch, tokens, heads, K),
        "k": torch.nn.functional.normalize(_random(batch, tokens, heads, K), dim=-1),
        "v": _random(batch, tokens, 4, V),
        "g": -0.1 * _random(batch, tokens, 4).abs(),
    }
    split |= {"beta" if delta else "dt": _random(batch, tokens, 4).sigmoid()}
    whole = {"initial_state": _random(sequences, 4, K, V)}
    return split, whole if delta else whole | {"D": _random(4)}


def _run_recurrence(op: Callable, x: dict, others: dict, options: dict) -> tuple[dict, dict]:
    with_states = {"final_states": True} if "sequence_shard" in options else {}
    out = op(**x, **others, **options, **with_states)
    return {"o": out.o}, {"final_state": out.final_state}


def _without_states(op: Callable, x: dict, others: dict, options: dict) -> tuple[dict, dict]:
    return {"o": op(**x, **{k: t for k, t in others.items() if k != "initial_state"}, **options).o}, {}


def _attention(x: dict, others: dict, options: dict, **mask: Any) -> tuple[dict, dict]:
    return dict(parallel.attention(**x, **options, **mask)._asdict()), {}


def _attention_inputs(batch: int, tokens: int, sequences: int) -> tuple[dict, dict]:
    return {"q": _random(batch, tokens, 4, 6), "k": _random(batch, tokens, 2, 6), "v": _random(batch, tokens, 2, 5)}, {}


def _convs(x: dict, others: dict, options: dict) -> tuple[dict, dict]:
    found = parallel.short_convs(list(x.values()), list(others.values()), activation="silu", **options)
    return {str(i): out.o for i, out in enumerate(found)}, {}


CASES: dict[str, Case] = {
    "gated delta rule": Case(
        lambda *n: _recurrent_inputs(*n, delta=True),
        lambda *x: _run_recurrence(parallel.chunk_gated_delta_rule, *x),
    ),
    "gated delta rule, normed": Case(
        lambda *n: _recurrent_inputs(*n, delta=True),
        lambda x, others, options: _without_states(
            parallel.chunk_gated_delta_rule, x, others, options | {"qk_l2norm": True, "scale": 0.3}
        ),
    ),
    "ssd": Case(
        lambda *n: _recurrent_inputs(*n, delta=False),
        lambda *x: _run_recurrence(parallel.chunk_ssd, *x),
    ),
    "ssd, one head of queries": Case(
        lambda *n: _recurrent_inputs(*n, delta=False, heads=1), lambda *x: _run_recurrence(parallel.chunk_ssd, *x)
    ),
    "short convolution": Case(
        lambda batch, tokens, _: ({"x": _random(batch, tokens, 3)}, {"weight": _random(3, 4), "bias": _random(3)}),
        lambda x, others, options: ({"o": parallel.short_conv(**x, **others, **options).o}, {}),
    ),
    "short convolutions": Case(
        lambda batch, tokens, _: (
            {"a": _random(batch, tokens, 3), "b": _random(batch, tokens, 2)},
            {"c": _random(3, 3), "d": _random(2, 3)},
        ),
        _convs,
    ),
    "token shift": Case(
        lambda batch, tokens, _: ({"x": _random(batch, tokens, 3)}, {}),
        lambda x, others, options: ({"o": parallel.shift_tokens(**x, **options)}, {}),
    ),
    "attention": Case(_attention_inputs, _attention),
    "window": Case(_attention_inputs, lambda *x: _attention(*x, window=9)),
    "window and sinks": Case(_attention_inputs, lambda *x: _attention(*x, window=7, sinks=3)),
    "window beyond a span": Case(_attention_inputs, lambda *x: _attention(*x, window=50, sinks=2)),
}


def check_operations(group: dist.ProcessGroup, names: list[str], group_bytes: int | None = None) -> dict[str, float]:
    """Return, by operation and batch, the largest relative error of values and gradients (on ranks other than 0: 0).

    `group_bytes` replaces `overlap.GROUP_BYTES`, so that small exchanges are also divided into groups of heads.
    """
    batches = [(name, layout) for name in names for layout in layouts(dist.get_world_size(group))]
    with mock.patch.object(overlap, "GROUP_BYTES", group_bytes or overlap.GROUP_BYTES):
        return {f"{name}, {layout}": operation_error(group, CASES[name], layout) for name, layout in batches}


def operation_error(group: dist.ProcessGroup, case: Case, layout: Layout) -> float:
    """Return rank 0's largest error of an operation split over `group`, relative to one process; 0 on other ranks."""
    torch.manual_seed(0)
    sequences = layout.batch if layout.boundaries is None else len(layout.boundaries) - 1
    inputs, others = case.inputs(layout.batch, layout.tokens, sequences)
    shard = SequenceShard(layout.tokens, layout.boundaries, layout=layout.layout, group=group)  # type: ignore[arg-type]
    boundaries = None if layout.boundaries is None else torch.tensor(layout.boundaries, dtype=torch.int32)

    def differentiated(whole: bool) -> list[Tensor]:
        leaves = {name: t.clone().requires_grad_() for name, t in (inputs | others).items()}
        options: dict[str, Any] = {"cu_seqlens": boundaries} if whole else {"sequence_shard": shard}
        x = {name: leaves[name] if whole else shard.split(leaves[name]) for name in inputs}
        split, equal = case.run(x, {name: leaves[name] for name in others}, options)
        generator = torch.Generator().manual_seed(1)
        loss, found = torch.zeros((), dtype=torch.float64), []
        for t in split.values():
            weight = torch.randn(t.shape[0], layout.tokens, *t.shape[2:], generator=generator, dtype=t.dtype)
            loss = loss + (t * (weight if whole else shard.split(weight))).sum()
            found.append(t.detach() if whole else gather_rows(shard, t))
        for t in equal.values():
            weight = torch.randn(t.shape, generator=generator, dtype=t.dtype)
            # each rank's loss has a different fraction of the total weight; the fractions sum to 1
            share = 1.0 if whole else 2.0 * (shard.rank + 1) / (shard.size * (shard.size + 1))
            loss = loss + share * (t * weight).sum()
            found.append(t.detach())
        grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
        for leaf, grad in zip(leaves.values(), grads, strict=True):
            grad = torch.zeros_like(leaf) if grad is None else grad
            if not whole:
                dist.all_reduce(grad, group=group)
            found.append(grad)
        return found

    split = differentiated(whole=False)
    # compare on rank 0 only, whose result a RankPool returns: comparing takes as long as the split call
    return relative_error(split, differentiated(whole=True)) if dist.get_rank(group) == 0 else 0.0


def require_equality(errors: dict[str, float | str]) -> None:
    """Fail if an error, as `check_operations` and `check_models` return them, exceeds the tolerance; print the largest.

    A model that refuses to be split fails, too.
    """
    worst = max(errors, key=lambda key: (isinstance(errors[key], str), errors[key]))
    print(f"largest relative error: {errors[worst]} ({worst})")
    error = errors[worst]
    assert isinstance(error, float), f"{worst}: {error}"
    assert error <= TOLERANCE, f"{worst}: {error}"


def relative_error(found: list[Tensor], expected: list[Tensor]) -> float:
    """Return the largest error in any of the tensors, relative to the largest element of the expected tensor."""
    pairs = zip(found, expected, strict=True)
    return max(((a - b).abs().max() / b.abs().max().clamp(min=1e-30)).item() if b.numel() else 0.0 for a, b in pairs)


_OPTIONS: dict[str, dict[str, Any]] = {
    "gated_delta_net": {"num_heads": 1, "num_v_heads": 2, "head_dim": 8},
    "window": {"type": "attention", "num_heads": 2, "window": 6, "sinks": 2},
    "mamba2": {"head_dim": 16, "state_size": 6},
    "attention": {"num_heads": 4, "num_kv_heads": 2, "qk_norm": True},
}


def core_models() -> dict[str, dict[str, Any]]:
    """Return the fields of tiny configurations: one with each of core's mixers alone, and a hybrid of all of them."""
    patterns = {name: [name] * 2 for name in ("gated_delta_net", "mamba2", "attention")}
    patterns["hybrid"] = ["gated_delta_net", "window", "mamba2", "attention"]
    fields = {"vocab_size": 53, "hidden_size": 16, "intermediate_size": 16, "initializer_range": 0.2, "pad_token_id": 0}
    return {
        name: fields
        | {"mixers": mixers, "num_hidden_layers": len(mixers), "mixer_options": {x: _OPTIONS[x] for x in mixers}}
        for name, mixers in patterns.items()
    }


def check_models(
    group: dist.ProcessGroup, model_class: type, configs: dict[str, Any], recompute: bool = False, **inputs: Any
) -> dict[str, float | str]:
    """Compare training on sequences split over the ranks of `group` with training in a single process.

    Return rank 0's largest relative error of loss, logits and gradients by model and batch (0 on other ranks), or, by
    model, the message with which it refuses to be split. If `recompute`, models train with gradient checkpointing.
    `inputs` are further inputs of the models, passed unsplit in both cases.
    """
    found: dict[str, float | str] = {}
    for name, config in configs.items():
        try:
            for layout in layouts(dist.get_world_size(group)):
                found[f"{name}, {layout}"] = model_error(group, model_class, config, layout, recompute, **inputs)
        except ValueError as error:
            if not any(
                text in str(error) for text in ("cannot split a sequence over ranks", "cannot be divided among")
            ):
                raise
            found[name] = str(error)
    return found


def model_error(
    group: dist.ProcessGroup, model_class: type, config: Any, layout: Layout, recompute: bool = False, **inputs: Any
) -> float:
    """Return the error of one model and batch in `check_models`."""
    torch.manual_seed(0)
    model = model_class(config).double().train()
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    ids = torch.randint(config.vocab_size, (layout.batch, layout.tokens))
    labels = ids.masked_fill(torch.rand(ids.shape) < 0.2, -100)
    shard = SequenceShard(layout.tokens, layout.boundaries, layout=layout.layout, group=group)  # type: ignore[arg-type]
    boundaries = None if layout.boundaries is None else torch.tensor(layout.boundaries, dtype=torch.int32)

    def differentiated(whole: bool) -> list[Tensor]:
        model.zero_grad()
        with parallel.sequence_shard(None if whole else shard):
            given = inputs | ({"cu_seqlens": boundaries} if whole else {})
            out = model(ids, labels=labels, use_cache=False, output_logits=True, **given)
        # call `backward` outside the context: gradient checkpointing must recompute the layers on split rows even then
        out.loss.backward()
        found = [out.loss.detach(), out.logits.detach() if whole else gather_rows(shard, out.logits)]
        for p in model.parameters():
            grad = torch.zeros_like(p) if p.grad is None else p.grad.clone()
            if not whole:
                dist.all_reduce(grad, group=group)
            found.append(grad)
        return found

    split = differentiated(whole=False)
    # compare on rank 0 only, whose result a RankPool returns: comparing takes as long as the split call
    return relative_error(split, differentiated(whole=True)) if dist.get_rank(group) == 0 else 0.0


def split_statistics(group: dist.ProcessGroup, model_class: type, config: Any) -> tuple[dict, dict]:
    """Return a training step's auxiliary tensors (no losses) and buffers, by the ranks of `group` and one process."""
    found = []
    tokens = 35 * dist.get_world_size(group)
    for shard in (SequenceShard(tokens, [0, 31, tokens], group=group), None):
        torch.manual_seed(0)
        model = model_class(config).double().train()
        ids = torch.randint(config.vocab_size, (1, tokens))
        given = {} if shard else {"cu_seqlens": torch.tensor([0, 31, tokens], dtype=torch.int32)}
        with parallel.sequence_shard(shard):
            out = model(ids, labels=ids, **given)
        shown = {name: x for name, x in out.auxiliary.items() if not name.endswith("_loss")}
        found.append(shown | dict(model.named_buffers()))
    return found[0], found[1]


def traffic_of(group: dist.ProcessGroup, model_class: type, config: Any) -> tuple[dict, dict]:
    """Return the bytes that this rank of two sends in a step: for one long document, and for documents inside ranks."""
    found = []
    for boundaries in ([0, 34], [0, 5, 17, 34]):
        torch.manual_seed(0)
        model, ids = model_class(config).double().train(), torch.randint(config.vocab_size, (1, 34))
        shard = SequenceShard(34, boundaries, group=group)
        with parallel.sequence_shard(shard):
            model(ids, labels=ids).loss.backward()
        found.append(dict(shard.traffic))
    return found[0], found[1]


def refusals(group: dist.ProcessGroup, model_class: type, config: Any) -> list[list[str]]:
    """Make calls with lengths, boundaries, shapes and inputs that must be refused; return the messages on each rank."""
    model = model_class(config)
    shard = SequenceShard(8, group=group)
    x = torch.zeros(1, 8, 2, 4)
    calls: list[Callable[[], Any]] = [
        lambda: SequenceShard(7, group=group),
        lambda: SequenceShard(6, layout="zigzag", group=group),
        lambda: SequenceShard(8, layout="ring", group=group),  # type: ignore[arg-type]
        lambda: SequenceShard(8, [0, 5, 4, 8], group=group),
        lambda: parallel.attention(x, x, x, sequence_shard=shard),
        lambda: model(torch.zeros(1, 6, dtype=torch.int64)),
        lambda: model(torch.zeros(1, 8, dtype=torch.int64), use_cache=True),
        lambda: model(torch.zeros(1, 8, dtype=torch.int64), cu_seqlens=torch.tensor([0, 8])),
    ]
    sentences = []
    for call in calls:
        try:
            with parallel.sequence_shard(shard):
                call()
            sentences.append("nothing was raised. Why. ")
        except ValueError as error:
            sentences.append(str(error))
    every: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(every, sentences, group=group)
    return every


def gpu_errors(group: dist.ProcessGroup, name: str, layout: str, packed: bool) -> dict[str, tuple[float, float]]:
    """Return, for each output and gradient, the errors of a split call and of one GPU, both relative to float64.

    Inputs are bfloat16, with head sizes that kernels support; gates are float32. If `packed`, a row has four sequences.
    """
    torch.manual_seed(0)
    tokens, case = 2 * dist.get_world_size(group) * 333, CASES[name]
    boundaries = [0, 77, 1000, tokens - 100, tokens] if packed else None
    batch, sequences = (1, 4) if packed else (2, 2)
    narrow = {"x", "weight", "bias", "q", "k", "v"}
    given = _kernel_inputs(name, batch, tokens, sequences)
    inputs, others = ({key: x.cuda() for key, x in part.items()} for part in given)
    shard = SequenceShard(tokens, boundaries, layout=layout, group=group)  # type: ignore[arg-type]
    cu_seqlens = None if boundaries is None else torch.tensor(boundaries, dtype=torch.int32, device="cuda")

    def differentiated(split: bool, exact: bool) -> dict[str, Tensor]:
        leaves = {}
        for key, x in (inputs | others).items():
            rounded = x.bfloat16() if key in narrow else x.float()
            leaves[key] = (rounded.double() if exact else rounded).requires_grad_()
        options: dict[str, Any] = {"sequence_shard": shard} if split else {"cu_seqlens": cu_seqlens}
        if exact:
            options["impl"] = "reference"
        x = {key: shard.split(leaves[key]) if split else leaves[key] for key in inputs}
        outputs, _ = case.run(x, {key: leaves[key] for key in others}, options)
        loss, found = torch.zeros((), device="cuda"), {}
        for key, t in outputs.items():
            generator = torch.Generator("cuda").manual_seed(1)
            weight = torch.randn(t.shape[0], tokens, *t.shape[2:], generator=generator, device="cuda")
            loss = loss + (t * (shard.split(weight) if split else weight)).sum()
            found[key] = gather_rows(shard, t) if split else t.detach()
        grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
        for (key, leaf), grad in zip(leaves.items(), grads, strict=True):
            grad = torch.zeros_like(leaf) if grad is None else grad
            if split:
                grad = grad.float()
                dist.all_reduce(grad, group=group)
            found[f"d{key}"] = grad
        return found

    exact, single, split = (differentiated(*flags) for flags in ((False, True), (False, False), (True, False)))

    def error(x: Tensor, y: Tensor) -> float:
        return ((x.double() - y).norm() / y.norm().clamp(min=1e-30)).item()

    return {key: (error(split[key], y), error(single[key], y)) for key, y in exact.items()}


def _kernel_inputs(name: str, batch: int, tokens: int, sequences: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return inputs for a case with head sizes that kernels support."""
    if name == "short convolution":
        return {"x": _random(batch, tokens, 64)}, {"weight": _random(64, 4), "bias": _random(64)}
    q, k, v = (
        _random(batch, tokens, heads, 64) for heads in ((2, 2, 4) if name in ("gated delta rule", "ssd") else (4, 2, 2))
    )
    if name not in ("gated delta rule", "ssd"):
        return {"q": q, "k": k, "v": v}, {}
    g = -0.01 * _random(batch, tokens, 4).abs()
    more = {"beta" if name == "gated delta rule" else "dt": _random(batch, tokens, 4).sigmoid()}
    whole = {"initial_state": _random(sequences, 4, 64, 64)}
    k = torch.nn.functional.normalize(k, dim=-1)
    return {"q": q, "k": k, "v": v, "g": g, **more}, whole if "beta" in more else whole | {"D": _random(4)}
