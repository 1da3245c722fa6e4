"""Tests of evaluations and prompts that are split over ranks: values must be those of a single process."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from support.split_contract import relative_error
from tokenmix_core.evaluation.perplexity import token_losses
from tokenmix_core.evaluation.split_rows import split_token_losses
from tokenmix_core.modeling import split_prefill


def split_losses(group: dist.ProcessGroup, model_class: type, config: Any) -> float:
    """Return the error of the losses by position, split over the ranks of `group`, relative to one process.

    The rows have 53 predicted tokens, an odd number.
    """
    torch.manual_seed(0)
    model = model_class(config).double().eval()
    ids = torch.randint(config.vocab_size, (2, 54))
    return relative_error([split_token_losses(model, ids, group=group, block=5)], [token_losses(model, ids)])


@torch.no_grad()
def split_prompts(group: dist.ProcessGroup, model_class: type, config: Any) -> dict[int, float]:
    """Return, by length of the prompt, the error of the logits after a split prompt and of two decoding steps after it.

    The errors are relative to one process.
    """
    errors = {}
    for tokens in (1, 7, 53):
        torch.manual_seed(0)
        model = model_class(config).double().eval()
        ids = torch.randint(config.vocab_size, (2, tokens + 2))
        logits, cache = split_prefill(model, ids[:, :tokens], group=group)
        steps = [model(ids[:, i : i + 1], cache=cache).logits[:, -1] for i in (tokens, tokens + 1)]
        whole = model(ids, use_cache=False).logits
        errors[tokens] = relative_error([logits, *steps], list(whole[:, -3:].unbind(1)))
    return errors
