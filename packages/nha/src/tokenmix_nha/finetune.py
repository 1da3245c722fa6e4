"""Finetuning of a converted model in the paper's two stages (appendix C.2)."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from transformers import AutoModelForCausalLM

# these imports register the model families
import tokenmix_nha.hybridized
import tokenmix_nha.model  # noqa: F401
from tokenmix_core import from_pretrained, require
from tokenmix_core.cli import load_tokenizer, run_finetune
from tokenmix_core.training import DataRecipe, OptimizerRecipe, Recipe, RunRecipe, Tokens, finetune_recipe, train_only
from tokenmix_nha.config import NhaConfig
from tokenmix_nha.model_windows import nha_mixers

MERGED = "merged"


def finetune(checkpoint: str, stage: int, *, rank: int = 16) -> Recipe:
    """Return the recipe of one stage: 5B tokens of SlimPajama, by the checkpoint's tokenizer, in rows of 2,048 tokens.

    Stage 1 trains the attention and freezes all other weights; stage 2 trains LoRA on all weights.

    Args:
        checkpoint: folder of a converted model; for stage 2, of the model that stage 1 has trained.
        stage: 1 or 2.
        rank: rank of the LoRA matrices.

    Raises:
        ValueError: `stage` is not 1 or 2, `rank` is below 1, or the model's attention is not NHA.
    """
    if stage not in (1, 2):
        raise ValueError(f"stage must be 1 or 2, got {stage!r}")
    if rank < 1:
        raise ValueError(f"rank must be at least 1, got {rank!r}")
    recipe = Recipe(
        name=f"finetune-stage{stage}",
        description="attention alone, FFN frozen" if stage == 1 else f"LoRA of rank {rank} on everything",
        model={},
        # use another seed per stage, so that stage 2 reads the rows in another order than stage 1
        data=DataRecipe(sources=["data/slimpajama"], seq_len=2048, documents="joined", data_seed=41 + stage),
        optimizer=OptimizerRecipe(
            total_tokens=Tokens("5B"),
            warmup_tokens=Tokens("50M"),
            learning_rate=3e-4,
            min_learning_rate=3e-5,
            weight_decay=0.01,
            max_grad_norm=1.0,
        ),
        run=RunRecipe(precision="bf16", seed=42, gradient_checkpointing=True, dataloader_num_workers=4),
    )
    prepare = freeze_all_but_attention if stage == 1 else partial(_with_lora, rank=rank)
    recipe = finetune_recipe(recipe, checkpoint, prepare)
    if not recipe.model_type.startswith(NhaConfig.model_type):
        raise ValueError(
            f"{checkpoint} holds a model of type {recipe.model_type!r}, whose attention is not NHA's: run "
            f"`tokenmix-nha convert {checkpoint} --out FOLDER` and finetune that folder"
        )
    return recipe


def freeze_all_but_attention(model: Any) -> Any:
    """Freeze all parameters of a model except those of its attention modules."""
    return train_only(model, nha_mixers(model))


def _with_lora(model: Any, rank: int) -> Any:
    model = with_lora(model, rank)
    model.enable_input_require_grads()
    return model


def with_lora(model: Any, rank: int) -> Any:
    """Add LoRA to every matrix of a model: linear layers, embedding, output layer, routers and experts.

    A tied embedding gets no LoRA: each of its two uses would train its own adapter, but merging would add both adapters
    to the one shared weight.

    Raises:
        ImportError: peft is not installed.
    """
    peft = require("peft", "peft", "tokenmix-nha")
    tied = {"embed_tokens", "lm_head"} if model.config.tie_word_embeddings else set()
    modules = dict(model.named_modules())
    wrapped = [
        n for n, m in modules.items() if isinstance(m, nn.Linear | nn.Embedding) and n.rpartition(".")[2] not in tied
    ]
    others = [
        n
        for n, p in model.named_parameters()
        if p.dim() >= 2 and not isinstance(modules[n.rpartition(".")[0]], nn.Linear | nn.Embedding)
    ]
    settings = peft.LoraConfig(
        r=rank, lora_alpha=2 * rank, target_modules=wrapped, target_parameters=others or None, task_type="CAUSAL_LM"
    )
    return peft.get_peft_model(model, settings)


def merge_lora(checkpoint: str, adapter: str | Path, out: str | Path) -> Any:
    """Merge the adapter in the folder `adapter` into the checkpoint's weights; save model and tokenizer to `out`."""
    peft = require("peft", "peft", "tokenmix-nha")
    model = peft.PeftModel.from_pretrained(
        from_pretrained(AutoModelForCausalLM, checkpoint, local_files_only=True), adapter
    )
    merged = model.merge_and_unload()
    merged.save_pretrained(out)
    load_tokenizer(adapter).save_pretrained(out)
    return merged


def command(args: argparse.Namespace, context: Any) -> int:
    """Run the command `tokenmix-nha finetune`, which trains one stage."""
    return run_finetune(args, {"stage": None, "rank": 16}, finetune, _merged)


def _merged(settings: Mapping[str, Any], folder: Path) -> Path:
    if settings["stage"] == 2:
        merge_lora(settings["checkpoint"], folder, folder / MERGED)
        return folder / MERGED
    return folder
