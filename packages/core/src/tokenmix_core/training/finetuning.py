"""Recipes that start from the weights of a checkpoint, not from random ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from tokenmix_core._utils.trust import from_pretrained
from tokenmix_core.training.recipe import Recipe

_OF_FILES = ("model_type", "architectures", "transformers_version", "dtype", "_name_or_path")


def finetune_recipe(recipe: Recipe, checkpoint: str, prepare: Callable[[Any], Any] | None = None) -> Recipe:
    """Return the recipe with its model and tokenizer replaced by a checkpoint's, whose weights are trained further.

    Args:
        recipe: provides data, optimizer and run settings.
        checkpoint: folder of a model and its tokenizer.
        prepare: takes the loaded model, in float32, and returns the model to train, for example with frozen parameters;
            with None all parameters are trained.
    """
    config = from_pretrained(AutoConfig, checkpoint, local_files_only=True)
    return replace(
        recipe,
        model={name: value for name, value in config.to_diff_dict().items() if name not in _OF_FILES},
        model_type=config.model_type,
        data=replace(recipe.data, tokenizer=checkpoint),
        make_model=partial(_loaded, checkpoint, prepare),
    )


def _loaded(checkpoint: str, prepare: Callable[[Any], Any] | None, recipe: Recipe) -> Any:
    # weights are float32; the precision of the recipe applies to the computation only
    settings: dict[str, Any] = {"config": recipe.model_config(), "dtype": "float32", "local_files_only": True}
    model = from_pretrained(AutoModelForCausalLM, checkpoint, **settings)
    return model if prepare is None else prepare(model)


def train_only(model: Any, modules: Iterable[nn.Module]) -> Any:
    """Freeze every parameter of the model that does not belong to one of `modules`; return the model."""
    model.requires_grad_(False)
    for module in modules:
        module.requires_grad_(True)
    if hasattr(model, "enable_input_require_grads"):
        # gradient checkpointing has no gradients if the input of a block does not require them
        model.enable_input_require_grads()
    return model
