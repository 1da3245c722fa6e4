"""Finetune a converted model in the paper's two stages (appendix C.2)."""

from __future__ import annotations

import argparse
import shlex
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

# registers the families
import tokenmix_nha.hybridized
import tokenmix_nha.model  # noqa: F401
from tokenmix_core import from_pretrained, require
from tokenmix_core.training import DataRecipe, OptimizerRecipe, Recipe, RunRecipe, Tokens
from tokenmix_nha.config import NhaConfig
from tokenmix_nha.model_windows import nha_mixers

MERGED = "merged"


def finetune(checkpoint: str, stage: int, *, rank: int = 16) -> Recipe:
    """Return the recipe of a stage: 5B tokens of SlimPajama in rows of 2,048 tokens of the checkpoint's tokenizer.

    Stage 1 trains the attention and freezes everything else; stage 2 trains LoRA on everything.

    Args:
        checkpoint: folder of a converted model; for stage 2, of the model that stage 1 wrote.
        stage: 1 or 2.
        rank: rank of LoRA.

    Raises:
        ValueError: `stage` is not 1 or 2, `rank` is below 1, or the model's attention is not NHA.
    """
    if stage not in (1, 2):
        raise ValueError(f"stage must be 1 or 2, got {stage!r}")
    if rank < 1:
        raise ValueError(f"rank must be at least 1, got {rank!r}")
    config = from_pretrained(AutoConfig, checkpoint, local_files_only=True)
    if not config.model_type.startswith(NhaConfig.model_type):
        raise ValueError(
            f"{checkpoint} holds a model of type {config.model_type!r}, whose attention is not NHA's: run "
            f"`tokenmix-nha convert {checkpoint} --out FOLDER` and finetune that folder"
        )
    drop = ("model_type", "architectures", "transformers_version", "dtype", "_name_or_path")
    fields = {name: value for name, value in config.to_diff_dict().items() if name not in drop}
    return Recipe(
        name=f"finetune-stage{stage}",
        description="attention alone, FFN frozen" if stage == 1 else f"LoRA of rank {rank} on everything",
        model=fields,
        model_type=config.model_type,
        # the second stage sees the rows in another order than the first
        data=DataRecipe(
            sources=["data/slimpajama"], tokenizer=checkpoint, seq_len=2048, documents="joined", data_seed=41 + stage
        ),
        optimizer=OptimizerRecipe(
            total_tokens=Tokens("5B"),
            warmup_tokens=Tokens("50M"),
            learning_rate=3e-4,
            min_learning_rate=3e-5,
            weight_decay=0.01,
            max_grad_norm=1.0,
        ),
        run=RunRecipe(precision="bf16", seed=42, gradient_checkpointing=True, dataloader_num_workers=4),
        make_model=partial(_attention_alone, checkpoint) if stage == 1 else partial(_with_lora, checkpoint, rank),
    )


def _load(checkpoint: str) -> PreTrainedModel:
    # weights are float32; the recipe's precision applies to the computation
    return from_pretrained(AutoModelForCausalLM, checkpoint, dtype="float32", local_files_only=True)


def _attention_alone(checkpoint: str, recipe: Recipe) -> PreTrainedModel:
    return freeze_all_but_attention(_load(checkpoint))


def freeze_all_but_attention(model: Any) -> Any:
    """Freeze every parameter outside the attention modules."""
    model.requires_grad_(False)
    for mixer in nha_mixers(model):
        mixer.requires_grad_(True)
    if hasattr(model, "enable_input_require_grads"):
        # gradient checkpointing needs a block input that requires gradients
        model.enable_input_require_grads()
    return model


def _with_lora(checkpoint: str, rank: int, recipe: Recipe) -> Any:
    model = with_lora(_load(checkpoint), rank)
    model.enable_input_require_grads()
    return model


def with_lora(model: Any, rank: int) -> Any:
    """Add LoRA to every matrix: linear layers, embedding and output layer, routers and experts.

    A tied embedding gets no LoRA: its two uses would train separate adapters, which merging adds to one weight.

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
    """Merge the adapter in a folder into the checkpoint's weights, and save the model with its tokenizer."""
    peft = require("peft", "peft", "tokenmix-nha")
    from tokenmix_core.cli import load_tokenizer

    model = peft.PeftModel.from_pretrained(
        from_pretrained(AutoModelForCausalLM, checkpoint, local_files_only=True), adapter
    )
    merged = model.merge_and_unload()
    merged.save_pretrained(out)
    load_tokenizer(adapter).save_pretrained(out)
    return merged


def command(args: argparse.Namespace, context: Any) -> int:
    """Run `tokenmix-nha finetune`: one stage."""
    from tokenmix_core.cli import is_checkpoint
    from tokenmix_core.training import overridden, resumed, run_lock, train_locked

    settings, out, fields = _arguments(args)
    checkpoint, stage, rank = settings["checkpoint"], settings["stage"], settings["rank"]
    if not is_checkpoint(checkpoint):
        raise ValueError(f"{checkpoint} holds no model: expected a folder with config.json and weights")
    recipe, resume = finetune(checkpoint, stage, rank=rank), bool(args.resume)
    recipe = resumed(recipe, out, fields, args.config) if resume else overridden(recipe, fields, args.config)
    # hold the lock until the merged model is written
    with run_lock(out, resume=resume):
        result = train_locked(recipe, out, resume=resume, recorded={"finetune": settings})
        if result.interrupted:
            again = shlex.join([*args.parser.prog.split(), "--resume", str(out)])
            print(f"stopped at step {result.step}; go on with: {again}")
            return 130
        folder = result.model_dir
        if stage == 2:
            folder = out / MERGED
            merge_lora(checkpoint, out, folder)
    print(f"trained {result.step} steps in {result.seconds:.0f} s; the model is in {folder}")
    return 0


def _arguments(args: argparse.Namespace) -> tuple[dict[str, Any], Path, list[str]]:
    """Return checkpoint, stage and rank, the run's folder, and the flags of recipe fields.

    With `--resume`, missing values come from the run's manifest.

    Raises:
        ValueError: the folder, the checkpoint or the stage is neither given nor in the manifest.
    """
    from tokenmix_core.training import read_manifest

    fields = list(args.rest)
    given = {"checkpoint": fields.pop(0) if fields and not fields[0].startswith("-") else None}
    given |= {"stage": args.stage, "rank": args.rank}
    out = Path(args.resume) if isinstance(args.resume, str) else args.out
    if out is None:
        raise ValueError("give the folder of the run: --out DIR, or --resume DIR to go on with one")
    saved = read_manifest(out).get("finetune", {}) if args.resume else {}
    settings = {"rank": 16, **saved} | {name: value for name, value in given.items() if value is not None}
    if absent := [name for name in ("checkpoint", "stage") if name not in settings]:
        raise ValueError(f"finetune needs {' and '.join(absent)}: CHECKPOINT --stage 1|2 --out DIR")
    return settings, out, fields
