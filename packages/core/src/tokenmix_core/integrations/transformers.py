"""transformers' own hybrid models, computed by our kernels.

    with use_kernels(model):
        model.generate(...)

transformers marks the functions that kernels may replace (`use_kernelized_func`, `hub_kernels.py`): the scans and
convolutions that a layer's forward calls. The package `kernels` replaces such functions for the whole process. This
module instead rebuilds a layer's forward so that these names refer to our functions, for one model or for a family, and
replaces the gated norm. The rest of the layer is unchanged. On a CPU our operations run their references, so that
results differ only by rounding.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import CellType, FunctionType, MethodType
from typing import Any, get_args

from torch import nn

from tokenmix_core.integrations.adapters import FUNCTIONS, gated_norm, norm_of_gated
from tokenmix_core.integrations.separation import handing_on, separating
from tokenmix_core.ops.types import Impl

_DELTA = ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule")
_SSD = ("mamba2_chunk_scan", "mamba2_selective_state_update", "mamba2_split_conv1d_scan_combined")
_CONVOLUTION = ("causal_conv1d_fn", "causal_conv1d_update")
# attributes that can hold a module's forward; accelerate's hooks keep the original one in the second
_ATTRIBUTES = ("forward", "_old_forward")
# name of the attribute that marks functions built by this module
_MARK = "_runs_tokenmix_kernels"
# a class that does not pass boundaries to its backbone, so its forward is wrapped
_LANGUAGE_MODEL = "Mamba2ForCausalLM"


@dataclass(frozen=True)
class Family:
    """The class names and functions of a family of transformers' models.

    Attributes:
        layer: name of the class whose forward calls the functions.
        norm: name of the class of the family's gated norm, "" if it has none; before transformers 5.23, Nemotron-H uses
            that of Zamba2.
        body: name of the backbone's class, which is wrapped to separate packed sequences.
        scan: functions that the layer calls, except convolutions.
        since: first version of transformers in which the layer calls these functions.
    """

    layer: str
    norm: str
    body: str
    scan: tuple[str, ...] = ()
    since: str = "5.17"

    @property
    def functions(self) -> tuple[str, ...]:
        """Names of all functions that the layer calls."""
        return (*_CONVOLUTION, *self.scan)


FAMILIES: dict[str, Family] = {
    "qwen3_next": Family("Qwen3NextGatedDeltaNet", "Qwen3NextRMSNormGated", "Qwen3NextModel", _DELTA),
    "qwen3_5": Family("Qwen3_5GatedDeltaNet", "Qwen3_5RMSNormGated", "Qwen3_5TextModel", _DELTA),
    "qwen3_5_moe": Family("Qwen3_5MoeGatedDeltaNet", "Qwen3_5MoeRMSNormGated", "Qwen3_5MoeTextModel", _DELTA),
    "olmo_hybrid": Family("OlmoHybridGatedDeltaNet", "OlmoHybridRMSNormGated", "OlmoHybridModel", _DELTA),
    "mamba2": Family("Mamba2Mixer", "MambaRMSNormGated", "Mamba2Model", _SSD),
    "bamba": Family("BambaMixer", "BambaRMSNormGated", "BambaModel", _SSD),
    "zamba2": Family("Zamba2MambaMixer", "Zamba2RMSNormGated", "Zamba2Model", _SSD),
    "nemotron_h": Family("NemotronHMamba2Mixer", "NemotronHRMSNormGated", "NemotronHModel", _SSD),
    "granitemoehybrid": Family(
        "GraniteMoeHybridMambaLayer", "GraniteMoeHybridRMSNormGated", "GraniteMoeHybridModel", _SSD
    ),
    "falcon_h1": Family("FalconH1Mixer", "FalconH1RMSNormGated", "FalconH1Model", _SSD),
    "qwen4_exp": Family(
        "Qwen4ExpTextGatedDeltaNet", "Qwen4ExpTextRMSNormGated", "Qwen4ExpTextModel", _DELTA, since="5.24"
    ),
    "lara_mini": Family("LaraMiniGatedDeltaNet", "LaraMiniRMSNormGated", "LaraMiniModel", _DELTA, since="5.24"),
    "lfm2": Family("Lfm2ShortConv", "", "Lfm2Model", since="5.24"),
    "lfm2_moe": Family("Lfm2MoeShortConv", "", "Lfm2MoeModel", since="5.24"),
    "lfm3": Family("Lfm3ShortConv", "", "Lfm3Model", since="5.24"),
}
_KDA = "Kimi delta attention (KDA), whose decay is a vector for each head"
_INDEXED = "indexed attention, which selects keys by a learned index"
_MAMBA1 = "the selective scan of Mamba-1, whose decay is a matrix for each channel"
# maps each family whose layers need an operation that this library lacks to that operation's name
UNCOVERED: dict[str, str] = {
    **dict.fromkeys(("kimi_linear", "bailing_hybrid"), _KDA),
    **dict.fromkeys(("mamba", "falcon_mamba", "jamba", "zamba"), _MAMBA1),
    **dict.fromkeys(("axk2", "deepseek_v32", "dots3_note", "glm5_next", "glm_moe_dsa", "hy_v4"), _INDEXED),
    **dict.fromkeys(("hy_v4_vl", "deepseek_v4", "minimax_m3_vl", "mistral_large4"), _INDEXED),
    "inkling": "attention with a learned bias for each distance",
    **dict.fromkeys(("inkling2", "inkling2_loop"), "the dynamic short convolution, whose weights depend on the token"),
    "zaya": "compressed convolutional attention (CCA), whose convolutions mix the channels of a head",
    "minimax": "lightning attention",
    "recurrent_gemma": "the real-gated linear recurrent unit (RG-LRU)",
    "rwkv": "the recurrence of RWKV-4",
    "xlstm": "the matrix memory of xLSTM (mLSTM)",
}


def use_kernels(model_or_family: nn.Module | str, *, impl: Impl | None = None) -> KernelUse:
    """Compute a transformers model, or all models of a family, by our kernels: training, prefill and decoding.

    Our kernels replace the gated delta rule, convolution and gated norm of Qwen3-Next, Qwen3.5 (and MoE), OLMo-Hybrid,
    Qwen4-Exp and Lara Mini; the convolution of LFM2 (and MoE) and LFM3; SSD, convolution and gated norm of Mamba2,
    Bamba, Zamba2, Nemotron-H, Granite-MoE-hybrid and Falcon-H1 (before transformers 5.23, Nemotron-H's norm belongs to
    the family Zamba2). Weights, caches and all other code remain those of transformers. Packed sequences, marked by
    `cu_seq_lens_q`, `seq_idx` or restarting `position_ids`, are separated in all layers, attention included, with the
    result of separate calls; a call with packed sequences must have no cache and no padding. A compiled model keeps the
    functions with which it was traced: call this before compiling. A copy of a model keeps the kernels in use when it
    was copied; an unpickled model has transformers' functions.

    Args:
        model_or_family: a model, possibly wrapped, or a key of `FAMILIES`, which affects existing and future models.
        impl: implementation of the operations, as for `tokenmix_core.ops`. "gluon" applies to whole sequences; for
            single tokens and convolutions the default is used.

    Returns:
        A handle that undoes the replacement, by `undo()` or at the end of a `with` block.

    Raises:
        ValueError: an unknown family, a model without such layers, layers modified by another library, or a version of
            transformers whose layers call other functions.
    """
    if impl is not None and impl not in get_args(Impl):
        raise ValueError(f"use_kernels: impl must be None or one of {', '.join(get_args(Impl))}, got {impl!r}")
    if isinstance(model_or_family, str):
        if model_or_family in UNCOVERED:
            raise ValueError(_missing(model_or_family))
        if model_or_family not in FAMILIES:
            raise ValueError(f"use_kernels: expected a model, or one of {', '.join(FAMILIES)}, got {model_or_family!r}")
        what = FAMILIES[model_or_family]
        try:
            family = importlib.import_module(_home(model_or_family))
        except ModuleNotFoundError:
            raise ValueError(f"use_kernels: {model_or_family} needs transformers {what.since} or newer") from None
        names = (what.layer, what.norm, what.body, _LANGUAGE_MODEL)
        classes = [cls for name in names if (cls := getattr(family, name, None)) is not None]
        return KernelUse([_Exchange(cls, "forward", _ours(cls, impl)) for cls in classes])
    if not isinstance(model_or_family, nn.Module):
        raise ValueError(f"use_kernels: expected a model or a family, got {type(model_or_family).__name__}")
    return _use(model_or_family, lambda cls: _ours(cls, impl))


def use_fallback(model: nn.Module) -> KernelUse:
    """Compute a model of a family in `FAMILIES` by transformers' torch functions, for comparisons with our kernels.

    Raises:
        ValueError: the reasons given at `use_kernels`, or the family currently runs our kernels.
    """

    def theirs(cls: type) -> Callable[..., Any]:
        family, home = _family(cls), importlib.import_module(cls.__module__)
        if getattr(vars(cls)["forward"], _MARK, False):
            raise ValueError(f"use_fallback: {cls.__name__} runs our kernels; undo that first")
        if family is None or cls.__name__ != family.layer:
            return vars(cls)["forward"]
        # transformers wraps the torch function in one that selects a package: take the wrapped function
        functions = {name: getattr(home, name).__wrapped__ for name in family.functions}
        return _rebuilt(cls, vars(cls)["forward"], functions)

    return _use(model, theirs)


def _use(model: nn.Module, forward: Callable[[type], Callable[..., Any]]) -> KernelUse:
    """Replace the forward of each supported module by `forward(cls)`; `cls` is the module's class in transformers."""
    layers = [(name, m, cls) for name, m in model.named_modules() if (cls := _known(type(m))) is not None]
    if not any(_runs_kernels(cls) for _, _, cls in layers):
        homes = {type(m).__module__ for m in model.modules()}
        if uncovered := next((name for name in UNCOVERED if _home(name) in homes), None):
            raise ValueError(_missing(uncovered))
        raise ValueError(
            f"use_kernels: {type(model).__name__} has no layers that can run our kernels; "
            f"supported families are {', '.join(FAMILIES)}"
        )
    # build all forwards before changing the first layer, because building checks the layers
    made = {cls: forward(cls) for cls in dict.fromkeys(cls for _, _, cls in layers)}
    attributes = [_attribute(name, m) for name, m, _ in layers]
    return KernelUse(
        [_Exchange(m, a, MethodType(made[cls], m)) for (_, m, cls), a in zip(layers, attributes, strict=True)]
    )


def _missing(family: str) -> str:
    return (
        f"use_kernels: {family} needs {UNCOVERED[family]}, which tokenmix has no operation for; run the model with "
        f"transformers' own functions"
    )


class _Exchange:
    """Replaces the forward of a class or module, until it is undone."""

    def __init__(self, owner: Any, attribute: str, ours: Any) -> None:
        self.owner, self.ours = owner, ours
        # the former forward; None if the class or module had none of its own
        self.before = vars(owner).get(attribute)
        setattr(owner, attribute, ours)

    def undo(self) -> bool:
        """Restore the former forward; return False if other code has since replaced ours."""
        for attribute in _ATTRIBUTES:
            if vars(self.owner).get(attribute) is self.ours:
                if self.before is not None:
                    setattr(self.owner, attribute, self.before)
                elif attribute == "forward":
                    delattr(self.owner, attribute)
                else:
                    setattr(self.owner, attribute, MethodType(type(self.owner).forward, self.owner))
                return True
        return False


class KernelUse:
    """Handle of replaced kernels, which undoes the replacement by `undo()` or at the end of a `with` block.

    Attributes:
        layers: number of modules, or classes of a family, that run our kernels.
    """

    def __init__(self, exchanges: list[_Exchange]) -> None:
        self._exchanges = exchanges
        self.layers = sum(_runs_kernels(_known(type(e.owner)) or e.owner) for e in exchanges)

    def undo(self) -> None:
        """Restore the former functions; a second call does nothing.

        Raises:
            ValueError: other code has replaced a forward since then; undo that replacement first.
        """
        left = [exchange for exchange in reversed(self._exchanges) if not exchange.undo()]
        self._exchanges = left
        if left:
            raise ValueError(f"undo: {len(left)} modules have been given another forward since; undo that first")

    def __enter__(self) -> KernelUse:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()

    def __repr__(self) -> str:
        return f"KernelUse(layers={self.layers}, undone={not self._exchanges})"


def _home(family: str) -> str:
    return f"transformers.models.{family}.modeling_{family}"


def _known(cls: type) -> type | None:
    """Return the supported transformers class that a class is or derives from, or None."""
    for base in cls.__mro__:
        if _family(base) is not None:
            return base
    return None


def _family(cls: type) -> Family | None:
    for name, family in FAMILIES.items():
        names = (family.layer, family.norm, family.body, _LANGUAGE_MODEL)
        if cls.__module__ == _home(name) and cls.__name__ in names:
            return family
    return None


def _runs_kernels(cls: type) -> bool:
    family = _family(cls)
    return family is not None and cls.__name__ in (family.layer, family.norm)


def _attribute(name: str, module: nn.Module) -> str:
    """Return the name of the module's attribute that holds the forward to replace."""
    own = vars(module).get("forward")
    # an unpickled module may have its class's forward as an attribute
    if own is None or getattr(own, _MARK, False) or getattr(own, "__func__", None) is type(module).forward:
        return "forward"
    if _ATTRIBUTES[1] in vars(module):
        return _ATTRIBUTES[1]
    raise ValueError(f"use_kernels: another library has changed the forward of {name!r}; use our kernels before that")


def _ours(cls: type, impl: Impl | None) -> Callable[..., Any]:
    """Return our forward of a transformers class.

    A layer's is rebuilt so that it calls our functions, a norm's is ours, and a model's separates packed sequences.
    """
    family = _family(cls)
    assert family is not None
    if not _runs_kernels(cls):
        made = (separating if cls.__name__ == family.body else handing_on)(vars(cls)["forward"])
        setattr(made, _MARK, True)
        return made
    if cls.__name__ == family.norm:
        norm = gated_norm if family.scan is _DELTA else norm_of_gated
        return norm if impl is None else _as_method(functools.partial(norm, impl=impl))
    functions = {name: functools.partial(FUNCTIONS[name], impl=impl) for name in family.functions}
    return _rebuilt(cls, vars(cls)["forward"], functions)


def _rebuilt(cls: type, forward: FunctionType, functions: dict[str, Callable]) -> FunctionType:
    """Rebuild a class's forward and its decorators so that the global names in `functions` refer to these functions.

    Raises:
        ValueError: the code does not call all of `functions`.
    """
    closure, scope, attributes = forward.__closure__, forward.__globals__, dict(vars(forward))
    inner = attributes.get("__wrapped__")
    if inner is not None:
        attributes["__wrapped__"] = _rebuilt(cls, inner, functions)
        cells = (attributes["__wrapped__"] if c.cell_contents is inner else c.cell_contents for c in closure or ())
        closure = tuple(map(CellType, cells))
    else:
        if missing := sorted(set(functions) - set(forward.__code__.co_names)):
            import transformers

            raise ValueError(
                f"use_kernels: {cls.__name__} of transformers {transformers.__version__} does not call "
                f"{', '.join(missing)}, as it does in {_since(cls)} to 5.24"
            )
        # leave out __name__: by it, torch.compile would find the module and in it the original functions
        scope = {name: value for name, value in scope.items() if name != "__name__"} | functions
    made = FunctionType(forward.__code__, scope, forward.__name__, forward.__defaults__, closure)
    made.__kwdefaults__, made.__doc__, made.__module__ = forward.__kwdefaults__, forward.__doc__, forward.__module__
    made.__annotations__, made.__qualname__ = forward.__annotations__, forward.__qualname__
    vars(made).update(attributes | {_MARK: True})
    return made


def _since(cls: type) -> str:
    family = _family(cls)
    return "5.17" if family is None else family.since


def _as_method(norm: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a norm's forward, a `partial` with options, in a function, because only functions become methods."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return norm(self, *args, **kwargs)

    setattr(forward, _MARK, True)
    return forward


for _norm in (gated_norm, norm_of_gated):
    setattr(_norm, _MARK, True)
    # pickle stores a bound method as its object and name: `getattr(object, name)` must find the class's forward
    _norm.__name__ = "forward"
