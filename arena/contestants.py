"""Who takes part: for each contestant the layers it is made of, as its authors would, and at one size of state."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import torch
from transformers import AutoModelForCausalLM

# register the families and their mixers
import tokenmix_lte.model  # noqa: F401
import tokenmix_nats_l.model  # noqa: F401
import tokenmix_nha.model  # noqa: F401
import tokenmix_oryx.model  # noqa: F401
from arena.sizes import Size
from tokenmix_core.nn.mlp import swiglu_width
from tokenmix_core.nn.registry import known_mixers
from tokenmix_core.training.recipe import Recipe
from tokenmix_lte.training import steer_sparsity
from tokenmix_lte.training_free import Method
from tokenmix_nats_l.recipes import TABLE_4
from tokenmix_nats_l.training import log_shares
from tokenmix_nha.windows import hybrid_windows, nha_layers
from tokenmix_oryx.recipes import FAMILIES, mode_rows

GDN, ATTENTION, WINDOW, MAMBA2, LTE, NSA, NATS_L = (
    "gated_delta_net",
    "attention",
    "window",
    "mamba2",
    "lte",
    "nsa",
    "nats_l",
)
# everybody has as many parameters; in the second division as large a state, too
PARAMETERS, STATE = "parameters", "state"
DIVISIONS = (PARAMETERS, STATE)
TOLERANCE = {PARAMETERS: 0.01, STATE: 0.05}
REFERENCE = {PARAMETERS: "attention", STATE: "oryx-tm"}
# ways to hold few tokens of attention that was trained to see all
EVICTIONS: tuple[Method, ...] = ("tova", "uniform")
# tokens that the scorer of laLTE reads
NARROWEST = 13
# the mode in which a contestant drops what it may
BOUNDED = "linear"
# the layer of every four that hybrids leave to attention, or to a mixer that keeps keys
FULL_PLACE = 3

Fields = Mapping[str, Any]


@dataclass(frozen=True)
class Contestant:
    """One mixer, or one pattern of them.

    Attributes:
        name: on the command line and in the names of files.
        title: in tables.
        layers: from the size, the fields of the configuration that the mixer decides.
        candidates: from the size, such fields with a state of constant size, in the order of its bytes, among which
            the one nearest to the reference's is taken; None where the state grows with the text, which keeps it out of
            that division.
        model_type: the family.
        mixer: a registered mixer that it needs; without it, it does not take part.
        callbacks: as of a `Recipe`.
        row_inputs: as of a `Recipe`.
        modes: the modes that it is measured in, each a line of the tables; none for a model without modes.
        drops: parts of a layer's state that its bounded form need not keep.
        extra: it takes part only where a size, or who asks, names it.
        ablates: the contestant that it is an ablation of, whose rates it takes.
        held: from the size, the tokens that its full attention holds where it evicts, in each of `EVICTIONS`, which
            need no training; each is one more line of the tables of associative recall.
    """

    name: str
    title: str
    layers: Callable[[Size], Fields]
    candidates: Callable[[Size], Iterator[Fields]] | None = None
    model_type: str = "tokenmix_hybrid"
    mixer: str | None = None
    callbacks: tuple[Callable[[Recipe], Any], ...] = ()
    row_inputs: Callable[[Recipe], Any] | None = None
    modes: tuple[str, ...] = ()
    drops: tuple[str, ...] = ()
    extra: bool = False
    ablates: str | None = None
    held: Callable[[Size], int] | None = None

    def takes_part(self, division: str) -> bool:
        """Tell whether its mixer is registered, and its state can be set where the division wants that."""
        known = self.mixer is None or self.mixer in known_mixers()
        return known and (division == PARAMETERS or self.candidates is not None)


def _heads(size: Size) -> int:
    return size.width // size.head


def _attention(size: Size, **options: Any) -> dict[str, Any]:
    return {"num_heads": size.width // size.attention_head, **options}


def _gdn(size: Size) -> dict[str, Any]:
    # its authors' proportions: keys three quarters of the width, values twice as wide
    return {"num_heads": max(1, round(0.75 * _heads(size))), "head_dim": size.head, "expand_v": 2.0}


def _square_gdn(size: Size) -> dict[str, Any]:
    return {"num_heads": _heads(size), "head_dim": size.head, "expand_v": 1.0}


def _pattern(*mixers: str, **options: Fields) -> Fields:
    """Mixers that repeat, with their options by label."""
    return {"mixers": list(mixers), "mixer_options": options}


def _windows(size: Size) -> Iterator[Fields]:
    for tokens in range(1, 4 * size.head):
        yield _pattern(WINDOW, window={"type": ATTENTION, **_attention(size, window=tokens)})


def _mamba2(size: Size, state_size: int) -> Fields:
    options = {"expand": 2.0, "head_dim": size.attention_head, "state_size": state_size}
    return _pattern(MAMBA2, mamba2=options)


def _nha(size: Size, window: int, slots: int, *, hybrid: bool = False) -> Fields:
    full = range(FULL_PLACE, size.layers, 4) if hybrid else ()
    return nha_layers(hybrid_windows(size.layers, window, full), num_heads=_heads(size), slots=slots)


def _lte(size: Size, window: int, cap: int) -> dict[str, Any]:
    return _attention(size, window=window, cap=cap, sinks=min(4, cap))


def _oryx(family: str) -> Callable[[Size], Fields]:
    def fields(size: Size) -> Fields:
        layers = _pattern("oryx", oryx={"linear_mixer": FAMILIES[family], "head_dim": size.head})
        return {**layers, "mode_chunk_size": size.seq_len // 8}

    return fields


def _gdn_and(mixer: str, size: Size, options: Fields) -> Fields:
    """Gated DeltaNet and another mixer by turns, as in LTE's paper."""
    return _pattern(GDN, mixer, **{"gated_delta_net": _gdn(size), mixer: options})


def _lalte(size: Size, **changes: Any) -> Fields:
    return _gdn_and(LTE, size, _lte(size, 3 * size.seq_len // 16, size.seq_len // 8) | changes)


def _in_reach(size: Size) -> int:
    """Tokens of a window, or that are held, beside laLTE: its window and half its cap, as in its paper."""
    return size.seq_len // 4


def _nats_l(size: Size, *, hybrid: bool) -> dict[str, Any]:
    heads = max(1, round(0.75 * _heads(size)))
    options = {"num_heads": heads, "head_dim": size.head, "expand_v": 2.0, "num_softmax_heads": 2 * heads}
    return options | {"rope": not hybrid}


def _nats_l_hybrid(size: Size, **changes: Any) -> Fields:
    options = _nats_l(size, hybrid=True) | changes
    return _pattern(GDN, GDN, GDN, NATS_L, gated_delta_net=_gdn(size), nats_l=options)


def _nsa(size: Size) -> dict[str, Any]:
    # as many of a row as its authors read of theirs: a quarter by blocks, an eighth by the window
    heads, block = size.width // size.attention_head, max(16, min(64, size.seq_len // 16))
    options = {"num_heads": heads, "num_kv_heads": max(1, heads // 4), "head_dim": size.attention_head, "block": block}
    return options | {"blocks": max(3, size.seq_len // 4 // block), "window": size.seq_len // 8}


_NHA: dict[str, Any] = {"model_type": "tokenmix_nha"}
_ORYX: dict[str, Any] = {
    "model_type": "tokenmix_oryx",
    "row_inputs": mode_rows,
    "modes": (BOUNDED, "attention"),
    "drops": ("kv",),
}
_LTE: dict[str, Any] = {"model_type": "tokenmix_lte", "callbacks": (steer_sparsity,)}
_NATS_L: dict[str, Any] = {"model_type": "tokenmix_nats_l", "callbacks": (log_shares,)}

CONTESTANTS = {
    contestant.name: contestant
    for contestant in (
        Contestant("attention", "Attention", lambda s: _pattern(ATTENTION, attention=_attention(s))),
        Contestant(
            "window",
            "Window",
            lambda s: _pattern(WINDOW, window={"type": ATTENTION, **_attention(s, window=s.seq_len // 8)}),
            _windows,
        ),
        Contestant(
            "gdn",
            "Gated DeltaNet",
            lambda s: _pattern(GDN, gated_delta_net=_gdn(s)),
            lambda s: iter([_pattern(GDN, gated_delta_net=_square_gdn(s))]),
        ),
        Contestant("mamba2", "Mamba-2", lambda s: _mamba2(s, 128), lambda s: iter([_mamba2(s, s.head // 2)])),
        Contestant(
            "gdn-h",
            "GDN-H",
            lambda s: _pattern(GDN, GDN, GDN, ATTENTION, gated_delta_net=_gdn(s), attention=_attention(s)),
        ),
        Contestant(
            "nha",
            "NHA",
            lambda s: _nha(s, s.near, s.slots),
            lambda s: (_nha(s, window, max(8, s.head // 4)) for window in range(1, s.head)),
            **_NHA,
        ),
        Contestant("nha-h", "NHA-H", lambda s: _nha(s, s.near, s.slots, hybrid=True), **_NHA),
        Contestant("gsa", "GSA", lambda s: _nha(s, 0, s.slots), lambda s: iter([_nha(s, 0, s.head // 2)]), **_NHA),
        Contestant("gsa-h", "GSA-H", lambda s: _nha(s, 0, s.slots, hybrid=True), **_NHA),
        Contestant("oryx-tm", "Oryx-TM", _oryx("tm"), lambda s: iter([_oryx("tm")(s)]), **_ORYX),
        Contestant("oryx-tg", "Oryx-TG", _oryx("tg"), lambda s: iter([_oryx("tg")(s)]), **_ORYX),
        Contestant(
            "lalte",
            "laLTE",
            _lalte,
            lambda s: (
                _pattern(GDN, LTE, gated_delta_net=_square_gdn(s), lte=_lte(s, window, cap))
                for window in range(NARROWEST, 2 * s.head)
                for cap in (window // 2,)
            ),
            **_LTE,
        ),
        Contestant(
            "lansa",
            "laNSA",
            lambda s: _gdn_and(NSA, s, _nsa(s)),
            model_type="tokenmix_lte",
            mixer=NSA,
        ),
        Contestant("nsa", "NSA", lambda s: _pattern(NSA, nsa=_nsa(s)), model_type="tokenmix_lte", mixer=NSA),
        Contestant("nats-l", "NAtS-L", lambda s: _pattern(NATS_L, nats_l=_nats_l(s, hybrid=False)), **_NATS_L),
        Contestant("nats-l-h", "NAtS-L Hybrid", _nats_l_hybrid, **_NATS_L),
        Contestant(
            "gdn-attention",
            "GDN, attention",
            lambda s: _gdn_and(ATTENTION, s, _attention(s)),
            extra=True,
            held=_in_reach,
        ),
        Contestant(
            "gdn-swa",
            "GDN, window",
            lambda s: _gdn_and(WINDOW, s, {"type": ATTENTION, **_attention(s, window=_in_reach(s))}),
            extra=True,
        ),
        Contestant("lalte-mlp", "laLTE, MLP", partial(_lalte, scorer="mlp"), extra=True, ablates="lalte", **_LTE),
        *(
            Contestant(
                f"nats-l-h-{name}",
                f"NAtS-L Hybrid, {name.replace('-', ' ')}",
                partial(_nats_l_hybrid, **TABLE_4[name]),
                extra=True,
                ablates="nats-l-h",
                **_NATS_L,
            )
            for name in TABLE_4
        ),
    )
}
# who takes part where nobody is named
EVERYBODY = tuple(name for name, contestant in CONTESTANTS.items() if not contestant.extra)


def run_in(name: str, division: str, size: Size) -> str:
    """The division in which a contestant is run for this one: one whose model is the same in both is run once."""
    contestant = CONTESTANTS[name]
    if contestant.candidates is not None and list(contestant.candidates(size)) == [contestant.layers(size)]:
        return PARAMETERS
    return division


def taking_part(division: str) -> list[Contestant]:
    """The contestants of a division, in the order of the tables."""
    return [contestant for contestant in CONTESTANTS.values() if contestant.takes_part(division)]


@dataclass(frozen=True)
class Model:
    """A contestant's model in a division.

    Attributes:
        fields: of its configuration, vocabulary and context aside.
        parameters: all but the embedding, which every model has alike; the other mode's of Oryx count, too.
        state_bytes: of one sequence at the longest context of the text task, in bfloat16: the least and the most. They
            differ where data decide what is kept, and by what may be dropped.
    """

    fields: Fields = field(hash=False)
    parameters: int
    state_bytes: tuple[int, int]


def config_of(contestant: Contestant, size: Size, fields: Fields) -> Any:
    """The configuration of a model that is only counted."""
    return Recipe("arena", "", model=_shared(size) | dict(fields), model_type=contestant.model_type).model_config()


def _shared(size: Size) -> dict[str, Any]:
    return {"vocab_size": size.words, "hidden_size": size.width, "num_hidden_layers": size.layers}


def _on_meta(contestant: Contestant, size: Size, fields: Fields) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config_of(contestant, size, fields))


def _count(contestant: Contestant, size: Size, fields: Fields) -> int:
    return _on_meta(contestant, size, fields).num_parameters(exclude_embeddings=True)


def state_bytes(contestant: Contestant, size: Size, fields: Fields, length: int | None = None) -> tuple[int, int]:
    """The least and the most that the model keeps of a sequence, in bfloat16.

    What a contestant may drop counts at the most and not at the least. The length is by default that of the text task's
    longest sequence, where every state that is bounded is full.
    """
    length = length or size.reach * size.seq_len
    model = _on_meta(contestant, size, {**fields, "intermediate_size": size.mlp_step})
    bounds = model.state_bounds(length, 1, torch.bfloat16)
    dropped = sum(
        mixer.make_state().parts[name].bounds(length, 1, torch.bfloat16).most
        for mixer in model.model.mixers
        for name in contestant.drops
    )
    return bounds.least - dropped, bounds.most


@cache
def solve(name: str, division: str, size: Size) -> Model:
    """A contestant's model with the parameters of the reference, and in the second division with its state.

    The mixer is as it is; the width of the MLPs takes up the difference. Two counts on the meta device give the line
    on which the number of parameters lies.

    Raises:
        ValueError: one that does not take part, or that no candidate makes equal within the tolerance.
    """
    contestant = CONTESTANTS[name]
    if not contestant.takes_part(division):
        raise ValueError(f"{name} does not take part in the division {division!r}")
    fields = dict(contestant.layers(size))
    if division == STATE:
        fields = _nearest_state(contestant, size)
    target = _target_parameters(size)
    low, high = (_count(contestant, size, {**fields, "intermediate_size": n * size.mlp_step}) for n in (1, 2))
    steps = 1 + round((target - low) / (high - low))
    if steps < 1:
        raise ValueError(f"{name}: its mixers alone have more parameters than the reference, {low:,} over {target:,}")
    fields["intermediate_size"] = steps * size.mlp_step
    parameters = _count(contestant, size, fields)
    if abs(parameters / target - 1) > TOLERANCE[PARAMETERS]:
        raise ValueError(f"{name}: {parameters:,} parameters are not equal to {target:,}; lower mlp_step")
    return Model(fields, parameters, state_bytes(contestant, size, fields))


@cache
def _target_parameters(size: Size) -> int:
    reference = CONTESTANTS[REFERENCE[PARAMETERS]]
    mlp = {"intermediate_size": swiglu_width(size.width, multiple=64)}
    return _count(reference, size, {**reference.layers(size), **mlp})


@cache
def target_state(size: Size) -> int:
    """The bytes of state of the second division."""
    reference = CONTESTANTS[REFERENCE[STATE]]
    assert reference.candidates is not None
    return state_bytes(reference, size, next(reference.candidates(size)))[0]


def _nearest_state(contestant: Contestant, size: Size) -> dict[str, Any]:
    assert contestant.candidates is not None
    target, candidates = target_state(size), list(contestant.candidates(size))

    @cache
    def bytes_of(i: int) -> int:
        return state_bytes(contestant, size, candidates[i])[0]

    # states grow along the candidates
    above = bisect_left(range(len(candidates)), target, key=bytes_of)
    around = [i for i in (above - 1, above) if 0 <= i < len(candidates)]
    best = min(around, key=lambda i: abs(bytes_of(i) - target))
    if (off := abs(bytes_of(best) / target - 1)) > TOLERANCE[STATE]:
        raise ValueError(
            f"{contestant.name}: no candidate has a state of {target:,} bytes, the nearest is {off:.1%} off"
        )
    return dict(candidates[best])


def recipe_of(contestant: Contestant, division: str, size: Size, base: Recipe) -> Recipe:
    """The task's recipe with the contestant's model."""
    model = _shared(size) | dict(base.model) | dict(solve(contestant.name, division, size).fields)
    recipe = replace(base, model=model, model_type=contestant.model_type, row_inputs=contestant.row_inputs)
    return replace(recipe, callbacks=contestant.callbacks + base.callbacks)
