"""Recipes that begin with the weights of a checkpoint instead of new ones."""

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
    """Return the recipe with a checkpoint's model and tokenizer, to train its weights further.

    Args:
        recipe: data, optimizer and run; its model is replaced.
        checkpoint: folder of the model and its tokenizer.
        prepare: takes the loaded model, in float32, and returns the model to train, such as one with frozen parameters.
            None trains all of its parameters.
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
    # weights are float32; the recipe's precision applies to the computation
    settings: dict[str, Any] = {"config": recipe.model_config(), "dtype": "float32", "local_files_only": True}
    model = from_pretrained(AutoModelForCausalLM, checkpoint, **settings)
    return model if prepare is None else prepare(model)


def train_only(model: Any, modules: Iterable[nn.Module]) -> Any:
    """Freeze every parameter of the model that is not in one of the modules."""
    model.requires_grad_(False)
    for module in modules:
        module.requires_grad_(True)
    if hasattr(model, "enable_input_require_grads"):
        # gradient checkpointing needs a block input that requires gradients
        model.enable_input_require_grads()
    return model
