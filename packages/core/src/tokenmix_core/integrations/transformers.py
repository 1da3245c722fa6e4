"""Other people's models on our kernels: transformers' own hybrid models, layer by layer.

    with use_kernels(model):
        model.generate(...)

transformers names the functions that a kernel may take the place of (`use_kernelized_func`, `hub_kernels.py`): the
scans and convolutions that a layer's forward calls. With `kernels` installed they are exchanged for the whole process;
here a layer's forward is made anew with ours under these names, for one model or for a family, and nothing else of the
layer changes. The gated norm that its `RMSNormGated` hook names is exchanged as well. On a CPU our operations are their
references, so that what changes is the rounding alone.
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
from tokenmix_core.ops.types import Impl

_DELTA = ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule")
_SSD = ("mamba2_chunk_scan", "mamba2_selective_state_update", "mamba2_split_conv1d_scan_combined")
_CONVOLUTION = ("causal_conv1d_fn", "causal_conv1d_update")
# a module's forward, and where accelerate's hooks keep the one that they call
_PLACES = ("forward", "_old_forward")
# functions made here bear it
_MARK = "_runs_tokenmix_kernels"


@dataclass(frozen=True)
class Family:
    """Where a family of models keeps what is exchanged.

    Attributes:
        layer: the class whose forward calls the functions.
        norm: the class of its gated norm. Nemotron-H has Zamba2's before transformers 5.23.
        scan: the functions that it calls beside the convolutions.
    """

    layer: str
    norm: str
    scan: tuple[str, ...]

    @property
    def functions(self) -> tuple[str, ...]:
        """The functions that the layer calls."""
        return (*_CONVOLUTION, *self.scan)


FAMILIES: dict[str, Family] = {
    "qwen3_next": Family("Qwen3NextGatedDeltaNet", "Qwen3NextRMSNormGated", _DELTA),
    "qwen3_5": Family("Qwen3_5GatedDeltaNet", "Qwen3_5RMSNormGated", _DELTA),
    "qwen3_5_moe": Family("Qwen3_5MoeGatedDeltaNet", "Qwen3_5MoeRMSNormGated", _DELTA),
    "olmo_hybrid": Family("OlmoHybridGatedDeltaNet", "OlmoHybridRMSNormGated", _DELTA),
    "mamba2": Family("Mamba2Mixer", "MambaRMSNormGated", _SSD),
    "bamba": Family("BambaMixer", "BambaRMSNormGated", _SSD),
    "zamba2": Family("Zamba2MambaMixer", "Zamba2RMSNormGated", _SSD),
    "nemotron_h": Family("NemotronHMamba2Mixer", "NemotronHRMSNormGated", _SSD),
    "granitemoehybrid": Family("GraniteMoeHybridMambaLayer", "GraniteMoeHybridRMSNormGated", _SSD),
    "falcon_h1": Family("FalconH1Mixer", "FalconH1RMSNormGated", _SSD),
}


def use_kernels(model_or_family: nn.Module | str, *, impl: Impl | None = None) -> KernelUse:
    """Let a model of transformers, or all models of a family, run our kernels, in training, prefill and decoding.

    Gated delta rule, convolution and gated norm of Qwen3-Next, Qwen3.5 (and MoE) and OLMo-Hybrid; SSD, convolution and
    gated norm of Mamba2, Bamba, Zamba2, Nemotron-H, Granite-MoE-hybrid and Falcon-H1 (before transformers 5.23
    Nemotron-H's norm is Zamba2's: exchanged in a model, and as Zamba2's family). Weights, caches and all else stay
    transformers'. Documents packed into rows are kept apart where a call tells their boundaries, as `cu_seq_lens_q` or
    `seq_idx`. A compiled model keeps what it was traced with: exchange first, then compile. A copy of a model goes on
    with what the model had then; a pickled one comes back as transformers made it.

    Args:
        model_or_family: a model, with whatever is around it, or a key of `FAMILIES`, for models made before and after.
        impl: implementation of the operations, as for `tokenmix_core.ops`; Gluon's is that of whole sequences, beside
            which single tokens and convolutions take the fastest kernels.

    Returns:
        What undoes it: by `undo()`, or at the end of a `with`.

    Raises:
        ValueError: a family that is not known, a model without such layers, one whose layers another library has
            changed, or a version of transformers whose layers call other functions.
    """
    if impl is not None and impl not in get_args(Impl):
        raise ValueError(f"use_kernels: impl must be None or one of {', '.join(get_args(Impl))}, got {impl!r}")
    if isinstance(model_or_family, str):
        if model_or_family not in FAMILIES:
            raise ValueError(f"use_kernels: expected a model, or one of {', '.join(FAMILIES)}, got {model_or_family!r}")
        family = importlib.import_module(_home(model_or_family))
        what = FAMILIES[model_or_family]
        classes = [getattr(family, what.layer)]
        classes += [getattr(family, what.norm)] if hasattr(family, what.norm) else []
        return KernelUse([_Exchange(cls, "forward", _ours(cls, impl)) for cls in classes])
    if not isinstance(model_or_family, nn.Module):
        raise ValueError(f"use_kernels: expected a model or a family, got {type(model_or_family).__name__}")
    return _use(model_or_family, lambda cls: _ours(cls, impl))


def use_fallback(model: nn.Module) -> KernelUse:
    """Let a model of these families run transformers' own functions in torch, whatever else is installed: to compare.

    Raises:
        ValueError: as `use_kernels`, or the family is exchanged.
    """

    def theirs(cls: type) -> Callable[..., Any]:
        family, home = _family(cls), importlib.import_module(cls.__module__)
        if getattr(vars(cls)["forward"], _MARK, False):
            raise ValueError(f"use_fallback: {cls.__name__} runs our kernels; undo that first")
        if family is None or cls.__name__ == family.norm:
            return vars(cls)["forward"]
        # what chooses between packages wraps the function in torch
        functions = {name: getattr(home, name).__wrapped__ for name in family.functions}
        return _made_anew(cls, vars(cls)["forward"], functions)

    return _use(model, theirs)


def _use(model: nn.Module, forward: Callable[[type], Callable[..., Any]]) -> KernelUse:
    """Exchange the forward of every layer of a model for the one that is made for its class."""
    layers = [(name, m, cls) for name, m in model.named_modules() if (cls := _known(type(m))) is not None]
    if not layers:
        raise ValueError(
            f"use_kernels: {type(model).__name__} has no layers that could run our kernels; "
            f"families that have are {', '.join(FAMILIES)}"
        )
    # all are looked at before the first is changed
    made = {cls: forward(cls) for cls in dict.fromkeys(cls for _, _, cls in layers)}
    places = [_place(name, m) for name, m, _ in layers]
    return KernelUse(
        [_Exchange(m, place, MethodType(made[cls], m)) for (_, m, cls), place in zip(layers, places, strict=True)]
    )


class _Exchange:
    """The forward of a class or of a module that is ours for a while."""

    def __init__(self, owner: Any, place: str, ours: Any) -> None:
        self.owner, self.ours = owner, ours
        # None where there was none of its own
        self.before = vars(owner).get(place)
        setattr(owner, place, ours)

    def undo(self) -> bool:
        """Put back what was there; False where something else is there by now."""
        for place in _PLACES:
            if vars(self.owner).get(place) is self.ours:
                if self.before is not None:
                    setattr(self.owner, place, self.before)
                elif place == "forward":
                    delattr(self.owner, place)
                else:
                    setattr(self.owner, place, MethodType(type(self.owner).forward, self.owner))
                return True
        return False


class KernelUse:
    """Our kernels in use: undone by `undo`, or at the end of a `with`.

    Attributes:
        layers: how many modules, or classes of a family, run ours.
    """

    def __init__(self, exchanges: list[_Exchange]) -> None:
        self._exchanges = exchanges
        self.layers = len(exchanges)

    def undo(self) -> None:
        """Put back what was there before; a second time there is nothing to do.

        Raises:
            ValueError: something else was exchanged since: undo that first.
        """
        left = [exchange for exchange in reversed(self._exchanges) if not exchange.undo()]
        self._exchanges = left
        if left:
            raise ValueError(
                f"undo: {len(left)} of {self.layers} layers have been given another forward since; undo that first"
            )

    def __enter__(self) -> KernelUse:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()

    def __repr__(self) -> str:
        return f"KernelUse(layers={self.layers}, undone={not self._exchanges})"


def _home(family: str) -> str:
    return f"transformers.models.{family}.modeling_{family}"


def _known(cls: type) -> type | None:
    """The class of transformers, of those that are exchanged, which this is or which it was made of."""
    for base in cls.__mro__:
        if _family(base) is not None:
            return base
    return None


def _family(cls: type) -> Family | None:
    for name, family in FAMILIES.items():
        if cls.__module__ == _home(name) and cls.__name__ in (family.layer, family.norm):
            return family
    return None


def _place(name: str, module: nn.Module) -> str:
    """Where a module's forward is to be exchanged."""
    own = vars(module).get("forward")
    # a pickled model comes back with the methods of its classes
    if own is None or getattr(own, _MARK, False) or getattr(own, "__func__", None) is type(module).forward:
        return "forward"
    if _PLACES[1] in vars(module):
        return _PLACES[1]
    raise ValueError(f"use_kernels: another library has changed the forward of {name!r}; use our kernels before that")


def _ours(cls: type, impl: Impl | None) -> Callable[..., Any]:
    """The forward of a class of transformers, calling our functions."""
    family = _family(cls)
    assert family is not None
    if cls.__name__ == family.norm:
        norm = gated_norm if family.scan is _DELTA else norm_of_gated
        return norm if impl is None else _as_method(functools.partial(norm, impl=impl))
    functions = {name: functools.partial(FUNCTIONS[name], impl=impl) for name in family.functions}
    return _made_anew(cls, vars(cls)["forward"], functions)


def _made_anew(cls: type, forward: FunctionType, functions: dict[str, Callable]) -> FunctionType:
    """The function, inside of its decorators, made of the same code that finds others under these names.

    Raises:
        ValueError: the code does not call them all.
    """
    closure, scope, attributes = forward.__closure__, forward.__globals__, dict(vars(forward))
    inner = attributes.get("__wrapped__")
    if inner is not None:
        attributes["__wrapped__"] = _made_anew(cls, inner, functions)
        cells = (attributes["__wrapped__"] if c.cell_contents is inner else c.cell_contents for c in closure or ())
        closure = tuple(map(CellType, cells))
    else:
        if missing := sorted(set(functions) - set(forward.__code__.co_names)):
            import transformers

            raise ValueError(
                f"use_kernels: {cls.__name__} of transformers {transformers.__version__} does not call "
                f"{', '.join(missing)}, as it does in 5.17 to 5.24"
            )
        # by this name torch.compile would find the module, and the originals in it
        scope = {name: value for name, value in scope.items() if name != "__name__"} | functions
    made = FunctionType(forward.__code__, scope, forward.__name__, forward.__defaults__, closure)
    made.__kwdefaults__, made.__doc__, made.__module__ = forward.__kwdefaults__, forward.__doc__, forward.__module__
    made.__annotations__, made.__qualname__ = forward.__annotations__, forward.__qualname__
    vars(made).update(attributes | {_MARK: True})
    return made


def _as_method(norm: Callable[..., Any]) -> Callable[..., Any]:
    """A norm's forward with options, as a function: one that a class binds to its modules."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return norm(self, *args, **kwargs)

    setattr(forward, _MARK, True)
    return forward


for _norm in (gated_norm, norm_of_gated):
    setattr(_norm, _MARK, True)
    # pickle looks for a method of a module by its name, and has to find that of the class
    _norm.__name__ = "forward"
