"""Recipes that train a checkpoint's weights further, instead of random weights."""

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
    """Return `recipe` with the model and tokenizer of a checkpoint, whose weights are trained further.

    Args:
        recipe: the recipe whose data, optimizer and run settings are used.
        checkpoint: folder of a model and its tokenizer.
        prepare: takes the loaded float32 model and returns the model to train, for example with frozen parameters; None
            trains all parameters.
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
    # float32 weights: the recipe's precision applies only to computations
    settings: dict[str, Any] = {"config": recipe.model_config(), "dtype": "float32", "local_files_only": True}
    model = from_pretrained(AutoModelForCausalLM, checkpoint, **settings)
    return model if prepare is None else prepare(model)


def train_only(model: Any, modules: Iterable[nn.Module]) -> Any:
    """Freeze all parameters of `model` except those of `modules`; return the model.

    The embeddings' outputs still require gradients, as gradient checkpointing needs.
    """
    model.requires_grad_(False)
    for module in modules:
        module.requires_grad_(True)
    if hasattr(model, "enable_input_require_grads"):
        # make the embeddings require gradients: gradient checkpointing computes none in a block whose input does not
        model.enable_input_require_grads()
    return model
