"""The contestants: the layers of each mixer as its authors propose them, and variants for equal sizes of state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

# these imports register the model families and their mixers
import tokenmix_lte.model  # noqa: F401
import tokenmix_nats_l.model  # noqa: F401
import tokenmix_nha.model  # noqa: F401
import tokenmix_oryx.model  # noqa: F401
from arena.sizes import Size
from tokenmix_core.training.recipe import Recipe
from tokenmix_lte.training import steer_sparsity
from tokenmix_lte.training_free import Method
from tokenmix_nats_l.recipes import TABLE_4
from tokenmix_nats_l.training import steer_shares
from tokenmix_nha.windows import hybrid_windows, nha_layers
from tokenmix_oryx.recipes import FAMILIES, mode_rows

GDN, ATTENTION, WINDOW, MAMBA2 = "gated_delta_net", "attention", "window", "mamba2"
LTE, NSA, NATS_L = "lte", "nsa", "nats_l"
# divisions of the comparison: in PARAMETERS, models have equal parameter counts; in STATE, also equal state sizes
PARAMETERS, STATE = "parameters", "state"
DIVISIONS = (PARAMETERS, STATE)
# methods, applied after training, that bound the KV cache of full attention
EVICTION_METHODS: tuple[Method, ...] = ("tova", "uniform")
# percentages of chunks that NAtS-L Hybrid should compute by softmax attention
SOFTMAX_SHARES = (10, 50)
# minimum window of laLTE: its scorer reads this number of tokens
MIN_LTE_WINDOW = 13
# the mode in which a contestant may drop the parts of its state that `droppable` lists
BOUNDED = "linear"
# index of the full-attention layer in each group of four layers of a hybrid
FULL_ATTENTION_LAYER = 3

Fields = Mapping[str, Any]


@dataclass(frozen=True)
class Contestant:
    """A mixer, or a repeating pattern of mixers, that takes part in the comparison.

    Attributes:
        name: name on the command line and in files.
        title: name in tables.
        layers: function of a size that returns the configuration fields by which the mixers are defined.
        candidates: function of a size that yields the configuration fields of layers whose state has constant size,
            sorted by the state's bytes; in the division `STATE`, the contestant has the layers whose state is nearest
            in bytes to that of `models.REFERENCE`. None if the state grows with the text: the contestant is not in that
            division.
        model_type: model family.
        callbacks, row_inputs: the fields of the same name in `Recipe`.
        modes: modes in which the model is evaluated, each a row of tables; empty for a model without modes.
        droppable: names of parts of a layer's `LayerState` that need not be kept in the mode `BOUNDED`.
        on_request: whether the contestant takes part only if a size or the command line names it.
        ablates: name of the contestant of which this is an ablation and whose learning rates it uses.
        capped: whether zero-shot retrieval is measured at several caps on the keys that LTE layers retain.
        kv_budget: function of a size that returns how many tokens full attention retains under each of
            `EVICTION_METHODS`; each method adds a row to the tables of associative recall and zero-shot retrieval.
    """

    name: str
    title: str
    layers: Callable[[Size], Fields]
    candidates: Callable[[Size], Iterator[Fields]] | None = None
    model_type: str = "tokenmix_hybrid"
    callbacks: tuple[Callable[[Recipe], Any], ...] = ()
    row_inputs: Callable[[Recipe], Any] | None = None
    modes: tuple[str, ...] = ()
    droppable: tuple[str, ...] = ()
    on_request: bool = False
    ablates: str | None = None
    capped: bool = False
    kv_budget: Callable[[Size], int] | None = None

    def eligible(self, division: str) -> bool:
        """True if the contestant can take part in a division; `STATE` requires a state of constant size."""
        return division == PARAMETERS or self.candidates is not None


def _heads(size: Size) -> int:
    return size.width // size.head_dim


def _attention(size: Size, **options: Any) -> dict[str, Any]:
    return {"num_heads": size.width // size.attention_head_dim, **options}


def _gdn(size: Size) -> dict[str, Any]:
    # the proportions of the authors: keys have three quarters of the width, and values are twice as wide as keys
    return {"num_heads": max(1, round(0.75 * _heads(size))), "head_dim": size.head_dim, "expand_v": 2.0}


def _window(size: Size) -> int:
    return size.seq_len // 8 // size.sparsity


def _square_gdn(size: Size) -> dict[str, Any]:
    return {"num_heads": _heads(size), "head_dim": size.head_dim, "expand_v": 1.0}


def _pattern(*mixers: str, **options: Fields) -> Fields:
    """Return the fields of a repeating pattern of mixers; `options` has options by the mixers' labels."""
    return {"mixers": list(mixers), "mixer_options": options}


def _gdn_hybrid(size: Size, **options: Any) -> Fields:
    return _pattern(GDN, GDN, GDN, ATTENTION, gated_delta_net=_gdn(size), attention=_attention(size, **options))


def _windows(size: Size) -> Iterator[Fields]:
    for tokens in range(1, 4 * size.head_dim):
        yield _pattern(WINDOW, window={"type": ATTENTION, **_attention(size, window=tokens)})


def _mamba2(size: Size, state_size: int) -> Fields:
    options = {"expand": 2.0, "head_dim": size.attention_head_dim, "state_size": state_size}
    return _pattern(MAMBA2, mamba2=options)


def _nha(size: Size, window: int, slots: int, *, hybrid: bool = False, **changes: Any) -> Fields:
    full = range(FULL_ATTENTION_LAYER, size.layers, 4) if hybrid else ()
    return nha_layers(hybrid_windows(size.layers, window, full), num_heads=_heads(size), slots=slots, **changes)


def _lte(size: Size, window: int, cap: int) -> dict[str, Any]:
    return _attention(size, window=window, cap=cap, sinks=min(4, cap))


def _oryx(family: str, **changes: Any) -> Callable[[Size], Fields]:
    def fields(size: Size) -> Fields:
        layers = _pattern("oryx", oryx={"linear_mixer": FAMILIES[family], "head_dim": size.head_dim})
        return {**layers, "mode_chunk_size": size.seq_len // 8, **changes}

    return fields


def _alternating_gdn(mixer: str, size: Size, options: Fields) -> Fields:
    """Return the fields of layers that alternate between Gated DeltaNet and another mixer, as in LTE's paper."""
    return _pattern(GDN, mixer, **{"gated_delta_net": _gdn(size), mixer: options})


def _lalte(size: Size, **changes: Any) -> Fields:
    return _alternating_gdn(LTE, size, _lte(size, 3 * _window(size) // 2, _window(size)) | changes)


def _token_budget(size: Size) -> int:
    """Return the window, or KV budget, of laLTE's baselines: laLTE's window plus half its cap, as in the paper."""
    return 2 * _window(size)


def _nats_l(size: Size, *, hybrid: bool) -> dict[str, Any]:
    heads = max(1, round(0.75 * _heads(size)))
    options = {"num_heads": heads, "head_dim": size.head_dim, "expand_v": 2.0, "num_softmax_heads": 2 * heads}
    return options | {"rope": not hybrid}


def _nats_l_hybrid(size: Size, **changes: Any) -> Fields:
    options = _nats_l(size, hybrid=True) | changes
    return _pattern(GDN, GDN, GDN, NATS_L, gated_delta_net=_gdn(size), nats_l=options)


def _nsa(size: Size) -> dict[str, Any]:
    # the authors' fractions of a training row: one quarter for selected blocks, one eighth for the window
    heads, block = size.width // size.attention_head_dim, max(16, min(64, size.seq_len // 16 // size.sparsity))
    options = {"num_kv_heads": max(1, heads // 4), "head_dim": size.attention_head_dim, "block": block}
    return _attention(size, **options, blocks=max(3, 2 * _window(size) // block), window=_window(size))


_NHA: dict[str, Any] = {"model_type": "tokenmix_nha"}
_ORYX: dict[str, Any] = {
    "model_type": "tokenmix_oryx",
    "row_inputs": mode_rows,
    "modes": (BOUNDED, "attention"),
    "droppable": ("kv",),
}
_LTE: dict[str, Any] = {"model_type": "tokenmix_lte", "callbacks": (steer_sparsity,)}
_NATS_L: dict[str, Any] = {"model_type": "tokenmix_nats_l", "callbacks": (steer_shares,)}


def _ablation(of: str, name: str, title: str, layers: Callable[[Size], Fields], **options: Any) -> Contestant:
    """Return an ablation of the contestant `of`, which takes part on request."""
    return Contestant(name, title, layers, on_request=True, ablates=of, **options)


CONTESTANTS = {
    contestant.name: contestant
    for contestant in (
        Contestant("attention", "Attention", lambda s: _pattern(ATTENTION, attention=_attention(s))),
        Contestant(
            "window",
            "Window",
            lambda s: _pattern(WINDOW, window={"type": ATTENTION, **_attention(s, window=_window(s))}),
            _windows,
        ),
        Contestant(
            "gdn",
            "Gated DeltaNet",
            lambda s: _pattern(GDN, gated_delta_net=_gdn(s)),
            lambda s: iter([_pattern(GDN, gated_delta_net=_square_gdn(s))]),
        ),
        Contestant("mamba2", "Mamba-2", lambda s: _mamba2(s, 128), lambda s: iter([_mamba2(s, s.head_dim // 2)])),
        Contestant("gdn-h", "GDN-H", _gdn_hybrid),
        Contestant(
            "nha",
            "NHA",
            lambda s: _nha(s, s.nha_window, s.nha_slots),
            lambda s: (_nha(s, window, max(8, s.head_dim // 4)) for window in range(1, s.head_dim)),
            **_NHA,
        ),
        Contestant("nha-h", "NHA-H", lambda s: _nha(s, s.nha_window, s.nha_slots, hybrid=True), **_NHA),
        Contestant(
            "gsa", "GSA", lambda s: _nha(s, 0, s.nha_slots), lambda s: iter([_nha(s, 0, s.head_dim // 2)]), **_NHA
        ),
        Contestant("gsa-h", "GSA-H", lambda s: _nha(s, 0, s.nha_slots, hybrid=True), **_NHA),
        Contestant("oryx-tm", "Oryx-TM", _oryx("tm"), lambda s: iter([_oryx("tm")(s)]), **_ORYX),
        Contestant("oryx-tg", "Oryx-TG", _oryx("tg"), lambda s: iter([_oryx("tg")(s)]), **_ORYX),
        Contestant(
            "lalte",
            "laLTE",
            _lalte,
            lambda s: (
                _pattern(GDN, LTE, gated_delta_net=_square_gdn(s), lte=_lte(s, window, cap))
                for window in range(MIN_LTE_WINDOW, 2 * s.head_dim)
                for cap in (window // 2,)
            ),
            capped=True,
            **_LTE,
        ),
        Contestant("lansa", "laNSA", lambda s: _alternating_gdn(NSA, s, _nsa(s)), model_type="tokenmix_lte"),
        Contestant("nsa", "NSA", lambda s: _pattern(NSA, nsa=_nsa(s)), model_type="tokenmix_lte"),
        Contestant("nats-l", "NAtS-L", lambda s: _pattern(NATS_L, nats_l=_nats_l(s, hybrid=False)), **_NATS_L),
        Contestant("nats-l-h", "NAtS-L Hybrid", _nats_l_hybrid, **_NATS_L),
        _ablation("gdn-h", "gdn-h-nope", "GDN-H, without RoPE", partial(_gdn_hybrid, rope=False)),
        _ablation("nats-l-h", "nats-l-h-rope", "NAtS-L Hybrid, RoPE", partial(_nats_l_hybrid, rope=True), **_NATS_L),
        *(
            _ablation(
                "nats-l-h",
                f"nats-l-h-share-{percent}",
                f"NAtS-L Hybrid, {percent} % softmax",
                partial(_nats_l_hybrid, softmax_share=percent / 100),
                **_NATS_L,
            )
            for percent in SOFTMAX_SHARES
        ),
        _ablation(
            "nha-h",
            "nha-h-fixed-sum",
            "NHA-H, fixed sum",
            lambda s: _nha(s, s.nha_window, s.nha_slots, hybrid=True, fusion="fixed"),
            **_NHA,
        ),
        _ablation(
            "oryx-tm",
            "oryx-tm-sequence",
            "Oryx-TM, one mode per sequence",
            _oryx("tm", mode_assignment="sequence"),
            **_ORYX,
        ),
        Contestant(
            "gdn-attention",
            "GDN, attention",
            lambda s: _alternating_gdn(ATTENTION, s, _attention(s)),
            on_request=True,
            kv_budget=_token_budget,
        ),
        Contestant(
            "gdn-swa",
            "GDN, window",
            lambda s: _alternating_gdn(WINDOW, s, {"type": ATTENTION, **_attention(s, window=_token_budget(s))}),
            on_request=True,
        ),
        _ablation("lalte", "lalte-mlp", "laLTE, MLP", partial(_lalte, scorer="mlp"), **_LTE),
        *(
            _ablation(
                "nats-l-h",
                f"nats-l-h-{name}",
                f"NAtS-L Hybrid, {name.replace('-', ' ')}",
                partial(_nats_l_hybrid, **TABLE_4[name]),
                **_NATS_L,
            )
            for name in TABLE_4
        ),
    )
}
# the contestants of a comparison whose `Size` names none
DEFAULT_CONTESTANTS = tuple(name for name, contestant in CONTESTANTS.items() if not contestant.on_request)


def training_division(name: str, division: str, size: Size) -> str:
    """Return the division under which the runs of a contestant for `division` are stored.

    A contestant whose model is the same in both divisions is trained only once.
    """
    contestant = CONTESTANTS[name]
    if contestant.candidates is not None and list(contestant.candidates(size)) == [contestant.layers(size)]:
        return PARAMETERS
    return division


def eligible(division: str) -> list[Contestant]:
    """Return the contestants that can take part in a division (see `DIVISIONS`), in the order of the tables."""
    return [contestant for contestant in CONTESTANTS.values() if contestant.eligible(division)]
