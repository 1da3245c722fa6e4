"""Check that vLLM, with our plug-in, generates the same tokens as `generate`; needs an environment with vLLM."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

# prompts of unequal lengths: one token, about a chunk of 64 tokens, and longer than several chunks
LENGTHS = (1, 3, 64, 65, 130, 40, 2, 200, 231)
NEW = 10


def prompts_of(vocab_size: int, lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    """Return prompts of unequal lengths; the last two begin with the tokens of the longest one."""
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(1, vocab_size, (n,), generator=generator).tolist() for n in lengths]
    longest = max(prompts, key=len)
    return [*prompts, longest + prompts[1], longest + prompts[5]]


@contextlib.contextmanager
def engine(folder: Path | str, **options: Any) -> Iterator[Any]:
    """Context manager: yield vLLM's engine for the model in a folder; prompts are split into chunks of 64."""
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_NO_USAGE_STATS="1",
        HF_HUB_OFFLINE="1",
        VLLM_USE_FLASHINFER_SAMPLER="0",
    )
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    from vllm import LLM  # pyright: ignore[reportMissingImports]
    from vllm.distributed import cleanup_dist_env_and_memory  # pyright: ignore[reportMissingImports]

    given = {"max_model_len": 512, "max_num_batched_tokens": 64, "max_num_seqs": 6, "enforce_eager": True, **options}
    llm = LLM(model=str(folder), skip_tokenizer_init=True, **given)
    try:
        yield llm
    finally:
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


def served_tokens(
    llm: Any, prompts: list[list[int]], new: int = NEW, requests: list[dict[str, Any] | None] | None = None
) -> tuple[list[list[int]], list[int]]:
    """Return the greedy tokens that vLLM generates, and how many tokens of each prompt it had cached.

    `requests` are the inputs of mixers that each request gives.
    """
    from vllm import SamplingParams  # pyright: ignore[reportMissingImports]

    greedy = {"temperature": 0, "max_tokens": new, "min_tokens": new, "ignore_eos": True, "detokenize": False}
    params = [SamplingParams(**greedy, extra_args=x) for x in requests or [None] * len(prompts)]
    outs = llm.generate([{"prompt_token_ids": x} for x in prompts], params, use_tqdm=False)
    return [list(x.outputs[0].token_ids) for x in outs], [x.num_cached_tokens or 0 for x in outs]


def generated_tokens(model: Any, prompts: list[list[int]], new: int = NEW, **inputs: Any) -> list[list[int]]:
    """Return the greedy tokens that `generate` returns for each prompt alone, with the given inputs of mixers."""
    options = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, **inputs}
    device = model.device
    return [model.generate(torch.tensor([x], device=device), **options)[0, len(x) :].tolist() for x in prompts]


@torch.no_grad()
def worst_gap(model: Any, prompts: list[list[int]], tokens: list[list[int]]) -> float:
    """Return the largest distance of a token's logit below the maximum, relative to the largest absolute logit."""
    worst = 0.0
    for prompt, new in zip(prompts, tokens, strict=True):
        ids = torch.tensor([prompt + new], device=model.device)
        logits = model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].double()
        chosen = logits.gather(1, ids[0, len(prompt) :, None])[:, 0]
        worst = max(worst, float((logits.amax(1) - chosen).max() / logits.abs().max()))
    return worst


def check_served(model: Any, folder: Path, *, prefix_caching: bool = False, **options: Any) -> None:
    """Assert that vLLM generates the tokens of `generate`, twice in a row; the second time from cached prefixes.

    Args:
        model: a causal language model in float32.
        folder: an empty folder, where it is saved.
        prefix_caching: whether vLLM keeps prefixes.
        options: further arguments of vLLM's engine.
    """
    model = model.eval()
    model.save_pretrained(folder)
    prompts = prompts_of(model.config.vocab_size)
    expected = generated_tokens(model, prompts)
    # vLLM requires that a step takes a whole block of a cached prefix, of 128 tokens for these models
    options = {"max_num_batched_tokens": 128 if prefix_caching else 64, **options}
    with engine(folder, dtype="float32", enable_prefix_caching=prefix_caching, **options) as llm:
        for turn in range(2):
            got, cached = served_tokens(llm, prompts)
            assert got == expected, turn
        assert bool(sum(cached)) == prefix_caching, cached
