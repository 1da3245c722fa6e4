"""Sample the next tokens of many requests at once, each with its own settings and random numbers."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tokenmix_core.kernels.launch.async_read import to_device

# maximum number of tokens whose log-probabilities a request may ask for
MOST_LOGPROBS = 20
# minimum temperature: below it the most likely token is taken, because logits / temperature would overflow float32
_LEAST_TEMPERATURE = 1e-5


@dataclasses.dataclass
class Sampling:
    """Sampling settings of one request, and what the engine reports about its tokens.

    Attributes:
        temperature: divides the logits; below 1e-5 the most likely token is taken.
        top_k: sample from the k most likely tokens; 0 for all.
        top_p: sample from the smallest set of most likely tokens whose joint probability reaches p.
        seed: seed of the random numbers, which do not depend on other requests; None for a random seed.
        logprobs: number of most likely tokens whose log-probabilities are stored beside that of each sampled token;
            None stores nothing.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    logprobs: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.temperature <= 100:
            raise ValueError(f"temperature must be in [0, 100], got {self.temperature}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be at least 0, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if self.logprobs is not None and not 0 <= self.logprobs <= MOST_LOGPROBS:
            raise ValueError(f"logprobs must be in [0, {MOST_LOGPROBS}], got {self.logprobs}")
        self.rng = random.Random(self.seed)
        # number of prompt tokens that were not computed, because a snapshot of an earlier prompt had their states
        self.cached_tokens = 0
        # for each sampled token, its log-probability and those of the most likely tokens
        self.chosen: list[tuple[float, list[tuple[int, float]]]] = []


def draw(logits: Float[Tensor, "n vocab"], requests: Sequence[Sampling]) -> Int[Tensor, "n"]:
    """Return the next token of each request: sampled or, at a temperature near 0, the most likely one.

    Append log-probabilities to the requests that ask for them.
    """
    tokens = logits.argmax(-1)
    rows = [i for i, x in enumerate(requests) if x.temperature >= _LEAST_TEMPERATURE]
    if rows:
        index = to_device(rows, logits.device)
        tokens[index] = _sample(logits[index].float(), [requests[i] for i in rows])
    asked = [i for i, x in enumerate(requests) if x.logprobs is not None]
    if asked:
        logs = logits[asked].float().log_softmax(-1)
        chosen = logs.gather(1, tokens[asked].unsqueeze(1)).squeeze(1).tolist()
        most = max(requests[i].logprobs or 0 for i in asked)
        values, indices = (x.tolist() for x in logs.topk(min(most, logs.shape[1])))
        for row, i in enumerate(asked):
            kept = requests[i].logprobs or 0
            likely = list(zip(indices[row][:kept], values[row][:kept], strict=True))
            requests[i].chosen.append((chosen[row], likely))
    return tokens


def _sample(logits: Float[Tensor, "n vocab"], requests: Sequence[Sampling]) -> Int[Tensor, "n"]:
    vocab = logits.shape[1]
    # one copy to the device for all settings
    settings = [(x.temperature, min(x.top_k or vocab, vocab), x.top_p, x.rng.random()) for x in requests]
    temperature, top_k, top_p, drawn = to_device(settings, logits.device, torch.float32).split(1, dim=1)
    ordered, index = (logits / temperature).sort(-1, descending=True)
    probs = ordered.softmax(-1)
    rank = torch.arange(vocab, device=logits.device)
    # probs.cumsum − probs: total probability of the tokens that are more likely than this one
    kept = (rank < top_k) & (probs.cumsum(-1) - probs < top_p)
    # keep at least one token: a top_p that rounds to 0 in float32 would keep none
    kept[:, 0] = True
    cumulative = (probs * kept).cumsum(-1)
    # clamp the index to the last kept token: by rounding, the random number may exceed the sum
    at = torch.searchsorted(cumulative, drawn * cumulative[:, -1:], right=True).minimum(kept.sum(-1, keepdim=True) - 1)
    return index.gather(1, at).squeeze(1)
