"""Configuration of a language model with a token mixer per layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from transformers import PreTrainedConfig

from tokenmix_core._utils import validation
from tokenmix_core.modeling.cache_name import NAMES
from tokenmix_core.modeling.folder_checks import MOST_LAYERS, check_sizes
from tokenmix_core.nn.loss import LossImpl
from tokenmix_core.nn.mixer import Mixer
from tokenmix_core.nn.registry import find_mixer
from tokenmix_core.nn.rotary import check_rope

# keys of a configuration that belong to transformers itself, besides the fields of its class
_OF_TRANSFORMERS = frozenset(
    {
        "_attn_implementation_internal",
        "_commit_hash",
        "_experts_implementation_internal",
        "_name_or_path",
        "attn_implementation",
        "auto_map",
        "experts_implementation",
        "model_type",
        "name_or_path",
        "num_labels",
        "output_attentions",
        "quantization_config",
        "rope_scaling",
        "rope_theta",
        "torch_dtype",
        "transformers_version",
    }
)


# maps a size's name in the configuration, which other libraries read, to the name of the mixers' attribute
DERIVED = {"num_attention_heads": "num_heads", "num_key_value_heads": "num_kv_heads", "head_dim": "head_dim"}


# without a limit, the list of labels could exhaust memory before an error message; no model has MOST_LAYERS layers
def check_depth(layers: Any) -> None:
    """Raise a ValueError for an implausible number of layers, before allocating anything per layer."""
    if isinstance(layers, int) and layers > MOST_LAYERS:
        raise ValueError(f"num_hidden_layers must be at most {MOST_LAYERS}, got {layers}")


class HybridConfig(PreTrainedConfig):
    """Sizes of the backbone, and the mixer of each layer.

    Args:
        vocab_size: number of tokens, rows of the embedding.
        hidden_size: model width D.
        num_hidden_layers: number of layers L.
        intermediate_size: inner width of the SwiGLU; 0 for blocks without a SwiGLU.
        mixers: label of each layer; a list whose length divides L is repeated; by default `default_mixers`.
        mixer_options: options of the mixer by label; "type" names a registered mixer, by default the label.
        norm_eps: epsilon of all norms.
        tie_word_embeddings: use the embedding's weight as that of the output layer.
        initializer_range: standard deviation of the initial weights.
        rope_parameters: transformers' convention; rope_type "default", "linear", "llama3" or "yarn".
        max_position_embeddings: context length of training; some rope types use it, but longer inputs are allowed.
        use_cache: whether inference keeps a cache by default.
        pad_token_id, bos_token_id, eos_token_id: padding token, and tokens that begin and end a text; None for none.
        loss_impl: implementation of the loss, as for `tokenmix_core.nn.loss.linear_cross_entropy`.

    Attributes:
        num_attention_heads, num_key_value_heads, head_dim: sizes of the softmax attention layers or, in a model without
            any, of all layers (then there are no key/value heads). A size that differs between these layers is absent.
        auto_map: transformers' field that lists a checkpoint's own Python code; empty unless such code was registered.

    Raises:
        ValueError: an unknown key, label, type or option, or sizes that do not fit together or that a mixer refuses.
    """

    model_type = "tokenmix_hybrid"
    keys_to_ignore_at_inference: ClassVar[list[str]] = [*NAMES, "auxiliary"]
    auto_map: ClassVar[Mapping[str, str] | None] = MappingProxyType({})
    # labels used if `mixers` is not given
    default_mixers: ClassVar[tuple[str, ...]] = ("attention",)

    vocab_size: int = 50257
    hidden_size: int = 768
    num_hidden_layers: int = 12
    intermediate_size: int = 2048
    mixers: list[str] | None = None
    mixer_options: dict[str, dict[str, Any]] | None = None
    norm_eps: float = 1e-6
    tie_word_embeddings: bool = True
    initializer_range: float = 0.02
    rope_parameters: dict[str, Any] | None = None
    max_position_embeddings: int = 4096
    use_cache: bool = True
    loss_impl: LossImpl | None = None
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs: Any):
        derived = {name: kwargs.pop(name) for name in DERIVED if name in kwargs}
        self._check_keys(kwargs)
        self.check_fields()
        self._check_sizes()
        pattern = list(self.default_mixers if self.mixers is None else self.mixers)
        if not pattern or self.num_hidden_layers % len(pattern):
            raise ValueError(
                f"mixers: expected a label for each of the {self.num_hidden_layers} layers, or a pattern whose length "
                f"divides them, got {len(pattern)} labels"
            )
        self.mixers = pattern * (self.num_hidden_layers // len(pattern))
        self.mixer_options = {label: dict(options) for label, options in (self.mixer_options or {}).items()}
        # older configurations use the name rope_scaling, which transformers prefers if both are present
        rope = kwargs.get("rope_scaling") or self.rope_parameters or {}
        validation.check_value("rope_scaling", rope, dict[str, Any])
        check_rope({name: kwargs[name] for name in ("rope_theta",) if name in kwargs} | rope)
        super().__post_init__(**kwargs)
        self._check_mixers()
        for name, value in derived.items():
            if value != (own := getattr(self, name, None)):
                raise ValueError(f"{name} follows from mixer_options: it is {own}, got {value!r}")

    def __getattr__(self, name: str) -> Any:
        if name in DERIVED and (size := self._derived().get(name)) is not None:
            return size
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _derived(self) -> dict[str, int]:
        """Return the sizes that are equal in all softmax attention layers, or in all layers if there are none."""
        layers = [i for i, kind in enumerate(self.layer_types) if kind != "linear_attention"]
        chosen = layers or range(len(self.labels))
        mixers = [self._mixer(i) for i in {self.labels[i]: i for i in chosen}.values()]
        found = {
            name: {getattr(mixer, own, getattr(mixer, "num_heads", None) if layers else None) for mixer in mixers}
            for name, own in DERIVED.items()
        }
        return {name: size for name, sizes in found.items() if len(sizes) == 1 and (size := sizes.pop()) is not None}

    def _mixer(self, layer_idx: int) -> Mixer:
        """Build and return a layer's mixer on the meta device, where it takes no memory."""
        with torch.device("meta"):
            return find_mixer(self.mixer_type(layer_idx)).from_config(self, layer_idx, **self.options_of(layer_idx))

    def to_dict(self) -> dict[str, Any]:
        """Return the fields and the derived head counts, which peft reads from this dictionary."""
        # head_dim is a field in older configurations of the papers' models, and must keep its value there
        return super().to_dict() | {name: size for name, size in self._derived().items() if name != "head_dim"}

    def to_diff_dict(self) -> dict[str, Any]:
        """Return the fields whose values differ from their defaults, as config.json stores them."""
        return {name: value for name, value in super().to_diff_dict().items() if name not in DERIVED}

    @classmethod
    def get_config_dict(cls, *args: Any, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Call transformers' method, but refuse a file that is not a configuration.

        Raises:
            ValueError: a `config.json` that is not a dictionary.
        """
        try:
            content, rest = super().get_config_dict(*args, **kwargs)
        except (TypeError, AttributeError):
            content, rest = None, {}
        if not isinstance(content, dict):
            source = args[0] if args else kwargs.get("pretrained_model_name_or_path")
            raise ValueError(f"{source}: config.json must hold a dictionary of fields, and does not")
        return content, rest

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any):
        """Call transformers' method, but refuse a dictionary of another model type.

        Raises:
            ValueError: a different `model_type`.
        """
        if (kind := config_dict.get("model_type", cls.model_type)) != cls.model_type:
            raise ValueError(f"{cls.__name__}: expected a configuration of model_type {cls.model_type!r}, got {kind!r}")
        # derive the sizes again: the mixers' options may have been edited since `to_dict` made the dictionary
        fields = {name: value for name, value in config_dict.items() if name not in DERIVED or name == "head_dim"}
        return super().from_dict(fields, **kwargs)

    @property
    def labels(self) -> list[str]:
        """The label of each layer."""
        return self.mixers or []

    @property
    def layer_types(self) -> list[str]:
        """Each layer's type by transformers' names, such as "full_attention" or "linear_attention"."""
        return [find_mixer(self.mixer_type(i)).layer_type(self.options_of(i)) for i in range(len(self.labels))]

    def mixer_type(self, layer_idx: int) -> str:
        """Return the registered name of the mixer of a layer."""
        label = self.labels[layer_idx]
        return (self.mixer_options or {}).get(label, {}).get("type", label)

    def options_of(self, layer_idx: int) -> dict[str, Any]:
        """Return the options of the mixer of a layer."""
        options = (self.mixer_options or {}).get(self.labels[layer_idx], {})
        return {name: value for name, value in options.items() if name != "type"}

    def check_fields(self) -> None:
        """Raise a ValueError for a field whose value does not match its annotation."""
        validation.check_fields(self, HybridConfig)

    def _check_keys(self, kwargs: dict[str, Any]) -> None:
        known = {field.name for field in dataclasses.fields(self)}
        if unknown := sorted(set(kwargs) - known - _OF_TRANSFORMERS):
            raise ValueError(
                f"{type(self).__name__}: unknown key {', '.join(map(repr, unknown))}; "
                f"known are {', '.join(sorted(known))}; options of a layer belong in mixer_options"
            )

    def _check_sizes(self) -> None:
        for name in ("vocab_size", "hidden_size", "num_hidden_layers", "max_position_embeddings"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"{name} must be at least 1, got {value!r}")
        check_sizes(vars(self))
        for name in ("intermediate_size", "initializer_range"):
            if (value := getattr(self, name)) < 0:
                raise ValueError(f"{name} must be at least 0, got {value!r}")
        if not self.norm_eps > 0:
            raise ValueError(f"norm_eps must be positive, got {self.norm_eps!r}")
        for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
            ids = getattr(self, name)
            for i in ids if isinstance(ids, list | tuple) else [ids]:
                if i is not None and not 0 <= i < self.vocab_size:
                    raise ValueError(f"{name} must lie in the vocabulary of {self.vocab_size}, got {i!r}")

    def _check_mixers(self) -> None:
        if unused := sorted(set(self.mixer_options or {}) - set(self.labels)):
            raise ValueError(f"mixer_options: no layer has the label {', '.join(map(repr, unused))}")
        for label, layer_idx in {label: i for i, label in enumerate(self.labels)}.items():
            mixer, options = find_mixer(self.mixer_type(layer_idx)), self.options_of(layer_idx)
            mixer.check_options(label, options)
            # the mixer's constructor checks its sizes
            try:
                self._mixer(layer_idx)
            except (ArithmeticError, RuntimeError, TypeError, ValueError) as error:
                raise ValueError(f"layers {label!r}: {error}") from error
