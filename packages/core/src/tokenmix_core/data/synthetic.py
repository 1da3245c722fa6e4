"""Seeded synthetic recall data: multi-query associative recall, copying, and the needle in a haystack.

Example i depends on `(seed, i)` alone, not on the number of examples in a call. So a training set of any size can be
read in any order, and a resumed run gets the examples that it would have got without the interruption.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from tokenmix_core._utils.rng import stream

IGNORE_INDEX = -100


class RecallExamples(NamedTuple):
    """Token sequences and the labels of the few positions that are scored.

    Attributes:
        input_ids: `[N, T]` int64.
        labels: `[N, T]` int64 in transformers' convention: `labels[:, t]` is what the logits at t − 1 should predict,
            −100 where nothing is scored.
    """

    input_ids: Int[Tensor, "N T"]
    labels: Int[Tensor, "N T"]


def mqar(
    num_examples: int,
    *,
    seq_len: int = 256,
    num_pairs: int = 8,
    vocab_size: int = 8192,
    seed: int = 0,
    first: int = 0,
    power: float = 0.01,
    random_filler: bool = True,
) -> RecallExamples:
    """Return examples of multi-query associative recall (Arora et al. 2023, Zoology).

    A sequence begins with `num_pairs` pairs of a key and its value, all different. Each key occurs once more later, 2γ
    positions after the last pair's key with p(γ) ∝ γ^(power − 1), γ ≥ 1; there the model must predict its value.
    Keys are drawn from [1, vocab_size / 2), values from [vocab_size / 2, vocab_size).

    Args:
        num_examples: N; the examples `first` … `first + N − 1` of this seed.
        seq_len: T.
        num_pairs: number of pairs and of scored positions in a sequence; at most T / 4.
        vocab_size: size of the vocabulary that keys, values and filler are drawn from.
        seed: examples are a function of `(seed, index)`.
        first: index of the first example.
        power: exponent of p(γ); 1 spreads the queries evenly, smaller values put most of them near the pairs.
        random_filler: fill the other positions with random tokens, which may equal keys and values; else with token 0.

    Raises:
        ValueError: sizes that are too small for an example, or negative counts.
    """
    if num_examples < 0 or first < 0:
        raise ValueError(f"mqar: num_examples and first must be at least 0, got {num_examples} and {first}")
    if num_pairs < 1 or 4 * num_pairs > seq_len:
        raise ValueError(
            f"mqar: num_pairs must be from 1 to seq_len / 4, got num_pairs={num_pairs} and seq_len={seq_len}"
        )
    half = vocab_size // 2
    if half - 1 < num_pairs:
        raise ValueError(
            f"mqar: vocab_size must be at least 2 (num_pairs + 1) = {2 * num_pairs + 2} for as many different keys, "
            f"got {vocab_size}"
        )
    if not power > 0:
        raise ValueError(f"mqar: power must be positive, got {power}")
    context = 2 * num_pairs
    slots = (seq_len - context) // 2
    log_weight = (power - 1) * np.log(np.arange(1, slots + 1))
    input_ids = np.zeros((num_examples, seq_len), dtype=np.int64)
    labels = np.full((num_examples, seq_len), IGNORE_INDEX, dtype=np.int64)
    for row in range(num_examples):
        rng = stream("mqar", seed, first + row)
        if random_filler:
            input_ids[row] = rng.integers(0, vocab_size, seq_len)
        keys = 1 + rng.choice(half - 1, num_pairs, replace=False)
        values = half + rng.choice(vocab_size - half, num_pairs, replace=False)
        input_ids[row, 0:context:2], input_ids[row, 1:context:2] = keys, values
        # Gumbel-top-k: the largest sums of log-weight and Gumbel noise are a draw without replacement
        slot = np.argsort(-(log_weight + rng.gumbel(size=slots)))[:num_pairs]
        query = context + 2 * slot
        input_ids[row, query] = keys
        labels[row, query + 1] = values
    return RecallExamples(torch.from_numpy(input_ids), torch.from_numpy(labels))


def copying(
    num_examples: int,
    *,
    seq_len: int = 256,
    num_tokens: int = 16,
    vocab_size: int = 64,
    selective: bool = False,
    seed: int = 0,
    first: int = 0,
) -> RecallExamples:
    """Return examples of copying (Arjovsky et al. 2016) or selective copying (Jing et al. 2019; Gu and Dao 2023).

    A sequence holds `num_tokens` tokens among blanks: at its beginning, or, if `selective`, at random positions. Then
    follow a marker and the same tokens in the same order, which the model must predict. Token 0 is the blank, token 1
    the marker; the tokens to copy are drawn from [2, vocab_size) and may occur several times.

    Args:
        num_examples: N; the examples `first` … `first + N − 1` of this seed.
        seq_len: T.
        num_tokens: number of tokens to copy and of scored positions; at most (T − 1) / 2.
        vocab_size: size of the vocabulary, blank and marker included.
        selective: whether the tokens to copy are at random positions, with blanks between them.
        seed: examples are a function of `(seed, index)`.
        first: index of the first example.

    Raises:
        ValueError: sizes that are too small for an example, or negative counts.
    """
    if num_examples < 0 or first < 0:
        raise ValueError(f"copying: num_examples and first must be at least 0, got {num_examples} and {first}")
    if num_tokens < 1 or 2 * num_tokens >= seq_len:
        raise ValueError(
            f"copying: num_tokens must be from 1 to (seq_len - 1) / 2, got num_tokens={num_tokens} and "
            f"seq_len={seq_len}"
        )
    if vocab_size < 4:
        raise ValueError(f"copying: vocab_size must be at least 4, for two tokens to tell apart, got {vocab_size}")
    answer = seq_len - num_tokens
    input_ids = np.zeros((num_examples, seq_len), dtype=np.int64)
    labels = np.full((num_examples, seq_len), IGNORE_INDEX, dtype=np.int64)
    for row in range(num_examples):
        rng = stream("copying", int(selective), seed, first + row)
        tokens = rng.integers(2, vocab_size, num_tokens)
        positions = np.arange(num_tokens)
        if selective:
            positions = np.sort(rng.choice(answer - 1, num_tokens, replace=False))
        input_ids[row, positions] = tokens
        input_ids[row, answer - 1] = 1
        input_ids[row, answer:] = labels[row, answer:] = tokens
    return RecallExamples(torch.from_numpy(input_ids), torch.from_numpy(labels))


class NiahExample(NamedTuple):
    """One needle in a haystack.

    Attributes:
        context: the instruction and the haystack with its needle.
        question: the rest of the prompt, up to the beginning of the answer; the prompt is `context + question`.
        answer: the value to find.
        depth: position of the needle, from 0 (start of the haystack) to 1 (end).
        tokens: length of the prompt.
    """

    context: str
    question: str
    answer: str
    depth: float
    tokens: int


class _NiahTask(NamedTuple):
    haystack: str
    value: str


# the three single-needle tasks of RULER: the content of the haystack, and the type of the value to find
NIAH_TASKS = {
    "s-niah-1": _NiahTask("noise", "number"),
    "s-niah-2": _NiahTask("text", "number"),
    "s-niah-3": _NiahTask("text", "uuid"),
}
# for each source of copying rows: whether blanks stand between the tokens to copy
COPYING = {"copying": False, "selective-copying": True}
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
_NOISE_WORDS = [*NOISE.split()[:-1], NOISE.split()[-1] + "\n"]
_ADJECTIVES = (
    "able amber ancient bold brave bright brisk broad calm clean clever cold cosy crisp curious damp dark deep eager "
    "early fair fancy fast fierce fine firm fond fresh gentle giant glad golden grand green happy hidden humble icy "
    "jolly keen kind large late lively lone long loud lucky mellow mild narrow neat noble odd old pale patient plain "
    "polite proud quick quiet rapid rare rough round royal rusty shy silent silver slim slow small smart smooth soft "
    "solid sour spare steep still stout strange sunny sweet swift tall tame thin tiny vast vivid warm wide wild wise "
    "young zesty"
)
_NOUNS = (
    "acorn anchor apple arrow attic badge bakery barn basket beach bell bench berry bicycle blanket boat bottle bridge "
    "broom bucket button cabin camel candle canyon carpet castle cedar chair cliff clock cloud coast comet copper "
    "cradle crane desert diamond dragon drum eagle engine falcon feather ferry field flute forest fountain fox garden "
    "gate glacier glove granite guitar hammer harbor hedge helmet hill island ivory jacket kettle kite ladder lagoon "
    "lake lantern lemon library lion lizard magnet maple market marble meadow mirror mountain needle nest oasis ocean "
    "olive orchard otter owl paddle palace pearl pebble pencil piano pillow pine planet pond prairie quilt rabbit "
    "raven ribbon river rocket saddle sail shell shovel spoon spruce squirrel stable statue stone storm table temple "
    "thunder tiger tower trumpet tunnel turtle valley velvet village violin walnut wagon willow window wolf zebra"
)


class Needle(NamedTuple):
    """A fact to hide.

    Attributes:
        kind: type of the value, "number" or "uuid".
        key: the word whose value the fact states.
        text: the sentence to hide.
        question: the beginning of a sentence that the answer completes.
        answer: the value.
    """

    kind: str
    key: str
    text: str
    question: str
    answer: str


def needle(task: str, rng: np.random.Generator) -> Needle:
    """Draw a fact like those of S-NIAH 1 to 3: the special magic number (or uuid) for some word."""
    kind = NIAH_TASKS[task].value
    key = f"{rng.choice(_ADJECTIVES.split())}-{rng.choice(_NOUNS.split())}"
    answer = str(rng.integers(10**6, 10**7)) if kind == "number" else _uuid(rng)
    text = f"One of the special magic {kind}s for {key} is: {answer}."
    return Needle(kind, key, text, f"The special magic {kind} for {key} mentioned in the provided text is", answer)


def niah(
    task: str,
    *,
    max_tokens: int,
    count_tokens: Callable[[str], int],
    depth: float,
    haystack: Sequence[str] = (),
    seed: int = 0,
    index: int = 0,
) -> NiahExample:
    """Return an example of S-NIAH 1 to 3 of RULER (Hsieh et al. 2024): one needle in the longest haystack that fits.

    The needle states the special magic number (or uuid) for some word; the question asks for it and ends with the
    beginning of the answer. S-NIAH-1 hides a number in repeated filler sentences, S-NIAH-2 a number in running text,
    S-NIAH-3 a uuid in running text.

    Args:
        task: "s-niah-1", "s-niah-2" or "s-niah-3".
        max_tokens: upper bound for the prompt and its answer.
        count_tokens: the length of a text in tokens.
        depth: position of the needle in the characters of the haystack, from 0 to 1; it is moved to the nearest
            boundary between words.
        haystack: words of the running text for S-NIAH-2 and -3. An example takes a random range of them, and continues
            with the first word after the last.
        seed, index: with the task and `max_tokens`, they determine key, value and range of the haystack.

    Raises:
        ValueError: an unknown task, a missing haystack, or `max_tokens` too few for the needle and its question.
    """
    if task not in NIAH_TASKS:
        raise ValueError(f"niah: task must be one of {', '.join(NIAH_TASKS)}, got {task!r}")
    if not 0 <= depth <= 1:
        raise ValueError(f"niah: depth must be from 0 to 1, got {depth}")
    in_text = NIAH_TASKS[task].haystack == "text"
    if in_text and not haystack:
        raise ValueError(f"niah: {task} needs the words of a running text as haystack, got none")
    rng = stream("niah", list(NIAH_TASKS).index(task), max_tokens, seed, index)
    kind, key, hidden, asked, answer = needle(task, rng)
    source = haystack if in_text else _NOISE_WORDS
    first = int(rng.integers(len(source))) if in_text else 0
    head = (
        f"A special magic {kind} is hidden within the following text. Make sure to memorize it. "
        f"I will quiz you about the {kind} afterwards.\n"
    )
    question = f"\nWhat is the special magic {kind} for {key} mentioned in the provided text? {asked}"

    def hide(count: int) -> tuple[str, float]:
        words = [source[(first + i) % len(source)] for i in range(count)]
        boundaries = np.cumsum([0, *(len(word) + 1 for word in words)])
        at = int(np.abs(boundaries - depth * boundaries[-1]).argmin())
        # words of repeated sentences contain line breaks: remove the blank that `join` puts after each of these
        text = " ".join([*words[:at], hidden, *words[at:]]).replace("\n ", "\n")
        return text, float(boundaries[at] / max(boundaries[-1], 1))

    def tokens(count: int) -> int:
        return count_tokens(head + hide(count)[0] + question)

    budget = max_tokens - count_tokens(" " + answer)
    bare = tokens(0)
    if bare > budget:
        raise ValueError(
            f"niah: max_tokens={max_tokens} is too short for the needle and its question, which need "
            f"{bare + max_tokens - budget} tokens"
        )
    # estimate the number of words from the tokens per word of a growing sample, then remove words until the text fits
    count, rate = 64, 0.0
    for _ in range(3):
        rate = max((tokens(count) - bare) / max(count, 1), 0.05)
        count = int((budget - bare) / rate)
    while (length := tokens(count)) > budget:
        count = max(0, count - max(1, int((length - budget) / rate)))
    text, at = hide(count)
    return NiahExample(head + text, question, answer, at, length)


def _uuid(rng: np.random.Generator) -> str:
    import uuid

    return str(uuid.UUID(bytes=rng.bytes(16), version=4))
