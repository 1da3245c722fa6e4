"""Finetuning of a converted model, or of only its scorers, with the losses of the paper."""

from __future__ import annotations

import argparse
from typing import Any

# this import registers the model family
import tokenmix_lte.model  # noqa: F401
from tokenmix_core.cli import run_finetune
from tokenmix_core.training import DataRecipe, OptimizerRecipe, Recipe, RunRecipe, Tokens, finetune_recipe, train_only
from tokenmix_lte.config import LteConfig
from tokenmix_lte.evals import lte_layers
from tokenmix_lte.training import steer_sparsity


def finetune(checkpoint: str, *, scorer: bool = False) -> Recipe:
    """Return a recipe that finetunes on 2B tokens of FineWeb-Edu, by the checkpoint's tokenizer, in rows of 4,096
    tokens.

    Unless `scorer`, all weights and the scorers are trained together, as in the paper's pretraining. The factor λ of
    each head's sparsity loss adapts until the head retains about as many keys of a row as its layer's cap.

    Args:
        checkpoint: folder of a converted model, or of any other model with LTE layers.
        scorer: whether to train only the scorers and freeze all other weights.

    Raises:
        ValueError: the model has no LTE layers whose scorer can be trained, or layers with different caps.
    """
    recipe = Recipe(
        name="finetune-scorer" if scorer else "finetune",
        description="the scorers alone" if scorer else "all weights and the scorers together",
        model={},
        data=DataRecipe(sources=["data/fineweb-edu"], seq_len=4096, documents="joined", data_seed=42),
        # λ, a head's weight of the sparsity loss, can grow from 1e-9 to 1 within 1,660 steps; this recipe has 3,815
        optimizer=OptimizerRecipe(
            total_tokens=Tokens("2B"),
            warmup_tokens=Tokens("50M"),
            learning_rate=3e-4 if scorer else 3e-5,
            min_learning_rate=3e-5 if scorer else 3e-6,
            adam_epsilon=1e-15,
        ),
        run=RunRecipe(precision="bf16", seed=42, gradient_checkpointing=True, dataloader_num_workers=4),
        callbacks=(steer_sparsity,),
    )
    recipe = finetune_recipe(recipe, checkpoint, train_scorers if scorer else None)
    if recipe.model_type != LteConfig.model_type:
        raise ValueError(
            f"{checkpoint} holds a model of type {recipe.model_type!r} without LTE layers: run "
            f"`tokenmix-lte convert {checkpoint} --out FOLDER` and finetune that folder"
        )
    steer_sparsity(recipe)
    return recipe


def train_scorers(model: Any) -> Any:
    """Freeze all parameters except those of the scorers."""
    scorers = (layer.scorer for layer in lte_layers(model).values())
    return train_only(model, [scorer for scorer in scorers if scorer is not None])


def command(args: argparse.Namespace, context: Any) -> int:
    """Run the command `tokenmix-lte finetune`."""
    return run_finetune(args, {"scorer": False}, finetune)
