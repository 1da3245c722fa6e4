"""Training rows from token files and synthetic tasks; their order depends on the seed and the epoch.

Row i of a run depends only on the recipe and on i. A run that was killed before row i therefore resumes as if it had
not been killed, on any number of processes, and without reading earlier rows.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NotRequired, TypedDict

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor
from torch.utils.data import Dataset

from tokenmix_core._utils.rng import stream
from tokenmix_core._utils.validation import undefined
from tokenmix_core.data import synthetic
from tokenmix_core.data.token_file import TokenFile
from tokenmix_core.data.tokenizer import encode_texts

IGNORE_INDEX = synthetic.IGNORE_INDEX
_BLOCK = 1000


# a function of a row's index that returns further inputs of the model by name, with one value per token
RowInputs = Callable[[int], dict[str, Tensor]]


class Row(TypedDict):
    """A row of T tokens, with labels.

    Attributes:
        input_ids: `[T]` int64.
        labels: `[T]` int64; `labels[t]` is the token that the logits at t − 1 should predict, −100 if none is scored.
        boundaries: positions inside the row at which documents begin.
        inputs: further inputs of the model by name, `[T, ...]`.
    """

    input_ids: Int[Tensor, "T"]
    labels: Int[Tensor, "T"]
    boundaries: Int[np.ndarray, "n"]
    inputs: NotRequired[dict[str, Tensor]]


def permuted(index: int, size: int, key: Sequence[int]) -> int:
    """Return the image of `index` under a permutation of `range(size)` that looks random and is determined by `key`.

    No table is stored. A Feistel network of four rounds permutes all integers of an even number of bits, the fewest
    that cover `size`; images outside the range are permuted again until they lie inside.
    """
    if not 0 <= index < size:
        raise ValueError(f"permuted: index must be from 0 to {size - 1}, got {index}")
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    salt = np.array([*key, size], dtype="<i8").tobytes()
    while True:
        left, right = index >> half, index & mask
        for step in range(4):
            word = hashlib.blake2b(step.to_bytes(1) + right.to_bytes(8), key=salt, digest_size=8).digest()
            left, right = right, left ^ (int.from_bytes(word) & mask)
        index = left << half | right
        if index < size:
            return index


class ChunkRows(Dataset):
    """The chunks of T tokens of a token file, in another order in each epoch; item i belongs to epoch i // chunks.

    Raises:
        ValueError: the file is shorter than one chunk.
    """

    def __init__(self, file: TokenFile, seq_len: int, seed: int) -> None:
        self.file, self.seq_len, self.seed = file, seq_len, seed
        self.chunks = len(file) // seq_len
        if self.chunks == 0:
            raise ValueError(f"{file.path} has {len(file)} tokens to train on, fewer than seq_len={seq_len}")

    def __getitem__(self, index: int) -> Row:
        epoch, position = divmod(index, self.chunks)
        start = permuted(position, self.chunks, (self.seed, epoch)) * self.seq_len
        stop = start + self.seq_len
        ids = torch.from_numpy(self.file.read(start, stop).astype(np.int64))
        return {"input_ids": ids, "labels": ids.clone(), "boundaries": self.file.boundaries(start, stop)}


class GrowingRows(Dataset):
    """Endless examples of a synthetic task, which grow during the first part of training.

    The size P of an example is `largest`, `largest` / 2, `largest` / 4, … or 2, with equal probability. If `packed`,
    its length is 4P, 8P, 16P, … tokens, at least 16 and at most T. Models learn recall faster from short examples.
    Therefore the sizes become available one by one over the first `ramp_rows` rows, at shrinking intervals, and packed
    examples have at most 16 times as many tokens as the largest available size. A subclass defines `examples`, which
    makes examples, and `draws`, which returns the random generator for a row's size and length.

    Args:
        seq_len: T, number of tokens in a row.
        largest: largest size of an example.
        vocab_size: number of different tokens in examples.
        seed: seed of the rows, each of which depends only on the seed and its index.
        packed: whether to fill each row with examples of one size, with boundaries between them; if False, a row is one
            example of T tokens.
        ramp_rows: number of rows after which all sizes occur; 0 if all occur from the start.

    Raises:
        ValueError: a size that is too small for an example.
    """

    def __init__(
        self, seq_len: int, largest: int, vocab_size: int, seed: int, *, packed: bool = True, ramp_rows: int = 0
    ) -> None:
        self.seq_len, self.vocab_size, self.seed = seq_len, vocab_size, seed
        self.packed, self.ramp_rows = packed, ramp_rows
        self.sizes = [largest >> i for i in range(largest.bit_length()) if largest >> i >= 2] or [largest]
        self.sizes.sort()
        # raise errors about sizes now, not during training
        self.examples(1, seq_len, largest, 0)

    def examples(self, count: int, seq_len: int, size: int, first: int) -> synthetic.RecallExamples:
        """Return `count` examples of `seq_len` tokens and of one size; `first` is the index of the first example."""
        raise undefined(self, "examples(count, seq_len, size, first)", "which makes the examples")

    def draws(self, index: int) -> np.random.Generator:
        """Return the random generator for the size and length of a row's examples."""
        raise undefined(self, "draws(index)", "which returns the random generator of a row")

    def __getitem__(self, index: int) -> Row:
        rng = self.draws(index)
        joined, longest = self.sizes, self.seq_len
        if index < self.ramp_rows:
            joined = joined[: 1 + index**2 * len(joined) // self.ramp_rows**2]
            longest = min(longest, 16 * joined[-1])
        size = int(rng.choice(joined))
        length = self.seq_len
        if self.packed:
            shortest = min(longest, max(16, 4 * size))
            length = shortest << int(rng.integers((longest // shortest).bit_length()))
        count, rest = divmod(self.seq_len, length)
        first = index * self.seq_len
        # make the last example longer, to use the tokens that would be left over in the row
        parts = (
            self.examples(count - 1, length, size, first),
            self.examples(1, length + rest, size, first + count - 1),
        )
        input_ids, labels = (torch.cat([x.flatten() for x in column]) for column in zip(*parts, strict=True))
        return {"input_ids": input_ids, "labels": labels, "boundaries": np.arange(1, count, dtype=np.int64) * length}


class MQARRows(GrowingRows):
    """Multi-query associative recall, see `tokenmix_core.data.synthetic.mqar`.

    An example's size is its number of pairs.
    """

    def examples(self, count: int, seq_len: int, size: int, first: int) -> synthetic.RecallExamples:
        options: dict[str, Any] = {"vocab_size": self.vocab_size, "seed": self.seed, "first": first}
        return synthetic.mqar(count, seq_len=seq_len, num_pairs=size, **options)

    def draws(self, index: int) -> np.random.Generator:
        return stream("mqar rows", self.seed, index)


class CopyRows(GrowingRows):
    """Copying and selective copying; see `tokenmix_core.data.synthetic.copying`.

    The size of an example is the number of tokens to copy.

    Args:
        task: "copying" or "selective-copying".
        sizes, options: as for `GrowingRows`; the vocabulary includes the blank token and the marker token.
    """

    def __init__(self, task: str, *sizes: int, **options: Any) -> None:
        self.selective = synthetic.COPYING[task]
        super().__init__(*sizes, **options)

    def examples(self, count: int, seq_len: int, size: int, first: int) -> synthetic.RecallExamples:
        options: dict[str, Any] = {"vocab_size": self.vocab_size, "seed": self.seed, "first": first}
        return synthetic.copying(count, seq_len=seq_len, num_tokens=size, selective=self.selective, **options)

    def draws(self, index: int) -> np.random.Generator:
        return stream("copy rows", int(self.selective), self.seed, index)


class NiahRows(Dataset):
    """Endless haystacks that contain facts and end with questions; only the answers are scored by the loss.

    Facts and questions are those of S-NIAH (`tokenmix_core.data.synthetic.niah`). Models learn too little from one fact
    per example. So an example contains 1, 2 or 4 facts with equal probability (fewer if they do not fit) in a haystack
    of random length, and ends with an end token. Over the first `ramp_rows` rows, examples grow at an increasing rate
    from one fact and 256 tokens to four facts and T tokens.

    Args:
        task: "s-niah-1", "s-niah-2" or "s-niah-3".
        tokenizer: turns the text into tokens.
        text: running text in which facts are placed, for the second and the third task; None for the first, in which a
            sentence is repeated.
        seq_len: T, number of tokens in a row.
        seed: seed of the rows, each of which depends only on the seed and its index.
        packed: whether to fill each row with examples, with boundaries between them; if False, a row is one example,
            followed by end tokens.
        ramp_rows: number of rows over which examples grow; 0 if they have full size from the start.

    Raises:
        ValueError: a row is too short for a fact and its question.
    """

    _FACTS = (1, 2, 4)
    _SHORTEST = 256

    def __init__(
        self,
        task: str,
        tokenizer: Any,
        text: TokenFile | None,
        seq_len: int,
        seed: int,
        *,
        packed: bool = True,
        ramp_rows: int = 0,
    ) -> None:
        self.task, self.tokenizer, self.text, self.seq_len, self.seed = task, tokenizer, text, seq_len, seed
        self.packed, self.ramp_rows = packed, ramp_rows
        if text is None:
            lines = 1 + seq_len // len(self._encode(synthetic.NOISE))
            self._noise = self._encode("\n".join([synthetic.NOISE] * lines))
        rng = stream("niah capacity", seed)
        if not all(self._example(rng, [], seq_len, 1)[0] for _ in range(8)):
            raise ValueError(f"{task}: seq_len={seq_len} is too short for a fact and its question")

    def _encode(self, text: str) -> list[int]:
        return encode_texts(self.tokenizer, [text])[0]

    def _haystack(self, rng: np.random.Generator) -> list[int]:
        """Return the tokens of the text in which a row's facts are placed."""
        if self.text is None:
            return self._noise
        start = int(rng.integers(max(1, len(self.text) - self.seq_len)))
        return self._encode(" ".join(self.tokenizer.decode(self.text.read(start, start + self.seq_len)).split()))

    def _example(
        self, rng: np.random.Generator, haystack: list[int], longest: int, facts: int
    ) -> tuple[list[int], list[int]]:
        """Return tokens and labels of an example of at most `longest` tokens and `facts` facts.

        The lists are empty if not even one fact fits.
        """
        drawn = {needle.key: needle for needle in (synthetic.needle(self.task, rng) for _ in range(facts))}
        hidden, asked, free = [], [], longest - 1
        for needle in drawn.values():
            fact = self._encode(f" {needle.text} ")
            question, answer = self._encode(f"\n{needle.question}"), self._encode(f" {needle.answer}")
            if (free := free - len(fact) - len(question) - len(answer)) < 0:
                break
            hidden.append(fact)
            asked.append((question, answer))
        if not hidden:
            return [], []
        used = sum(map(len, hidden)) + sum(len(x) for pair in asked for x in pair)
        length = min(len(haystack), int((longest - 1 - used) * rng.random()))
        boundaries = [0, *sorted(int(at) for at in rng.integers(0, length + 1, len(hidden))), length]
        parts = [haystack[start:stop] for start, stop in itertools.pairwise(boundaries)]
        ids = [*parts[0], *(token for pair in zip(hidden, parts[1:], strict=True) for x in pair for token in x)]
        labels = [IGNORE_INDEX] * len(ids)
        for i in rng.permutation(len(asked)):
            question, answer = asked[i]
            ids += question + answer
            labels += [IGNORE_INDEX] * len(question) + answer
        return [*ids, self.tokenizer.eos_token_id], [*labels, IGNORE_INDEX]

    def __getitem__(self, index: int) -> Row:
        rng = stream("niah rows", self.seed, index)
        grown = min(1.0, index / self.ramp_rows) ** 2 if self.ramp_rows else 1.0
        longest = round(self._SHORTEST + (self.seq_len - self._SHORTEST) * grown)
        joined = self._FACTS[: 1 + int(len(self._FACTS) * grown)]
        haystack = self._haystack(rng)
        ids: list[int] = []
        labels: list[int] = []
        boundaries: list[int] = []
        while True:
            free = min(longest, self.seq_len - len(ids))
            more, scored = self._example(rng, haystack, free, int(rng.choice(joined)))
            if not more:
                break
            ids += more
            labels += scored
            haystack = haystack[len(more) :]
            boundaries.append(len(ids))
            if not self.packed:
                break
        left = self.seq_len - len(ids)
        ids += [self.tokenizer.eos_token_id] * left
        labels += [IGNORE_INDEX] * left
        return {
            "input_ids": torch.tensor(ids),
            "labels": torch.tensor(labels),
            "boundaries": np.array([boundary for boundary in boundaries if boundary < self.seq_len], dtype=np.int64),
        }


class MixedRows(Dataset):
    """A dataset of `length` rows that mixes several datasets in fixed proportions.

    Each block of 1,000 rows has rows of all datasets in proportion to `weights`, rounded, in a random order that is
    drawn from `seed` and is the same in all blocks. The rows of each dataset keep their order. `inputs` maps a row's
    index to further inputs of the model, which are added to the row.

    Raises:
        ValueError: a weight that is not positive, or so small that a block would have no row of its dataset.
    """

    def __init__(
        self,
        datasets: Sequence[Dataset],
        weights: Sequence[float],
        length: int,
        seed: int,
        inputs: RowInputs | None = None,
    ) -> None:
        if len(weights) != len(datasets) or not all(w > 0 and np.isfinite(w) for w in weights):
            raise ValueError(f"weights must be {len(datasets)} positive, one for each source, got {weights}")
        share = np.asarray(weights) / sum(weights) * _BLOCK
        counts = np.floor(share).astype(int)
        for i in np.argsort(counts - share)[: _BLOCK - counts.sum()]:
            counts[i] += 1
        if (counts == 0).any():
            raise ValueError(f"each weight must be at least a {_BLOCK}th of their sum, got {list(weights)}")
        self.datasets, self.length, self.counts, self.inputs = list(datasets), length, counts, inputs
        self.pattern = stream("mixed rows", seed).permutation(np.repeat(np.arange(len(counts)), counts))
        self.rank = np.zeros(_BLOCK, dtype=int)
        for i, count in enumerate(counts):
            self.rank[self.pattern == i] = np.arange(count)

    @property
    def token_files(self) -> list[TokenFile]:
        """The token files from which rows are cut, or whose text fills the haystacks in which facts are hidden."""
        files = [getattr(dataset, "file", getattr(dataset, "text", None)) for dataset in self.datasets]
        return [file for file in files if isinstance(file, TokenFile)]

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Row:
        block, offset = divmod(index, _BLOCK)
        chosen = self.pattern[offset]
        row = self.datasets[chosen][int(block * self.counts[chosen] + self.rank[offset])]
        return row if self.inputs is None else Row(**{**row, "inputs": self.inputs(index)})


def _inputs(row: Row) -> dict[str, Tensor]:
    return row.get("inputs", {})


def collate_joined(rows: Sequence[Row]) -> dict[str, Tensor]:
    """Return a batch `[B, T]` in which documents of one row see each other.

    A row's first token is never predicted.
    """
    labels = torch.stack([row["labels"] for row in rows])
    labels[:, 0] = IGNORE_INDEX
    more = {name: torch.stack([_inputs(row)[name] for row in rows]) for name in _inputs(rows[0])}
    return {"input_ids": torch.stack([row["input_ids"] for row in rows]), "labels": labels, **more}


def collate_separate(rows: Sequence[Row]) -> dict[str, Tensor]:
    """Return a packed batch `[1, B·T]` in which no document sees another.

    `cu_seqlens` holds the boundaries of rows and documents, padded with empty sequences to a power of two plus one
    elements, so that a compiled model meets few shapes. The first token of a sequence is never predicted, because the
    token before it belongs to another document.
    """
    input_ids = torch.cat([row["input_ids"] for row in rows])
    labels = torch.cat([row["labels"] for row in rows])
    starts, offset = [], 0
    for row in rows:
        starts += [offset, *(offset + row["boundaries"]).tolist()]
        offset += len(row["input_ids"])
    labels[torch.tensor(starts)] = IGNORE_INDEX
    sequences = 1 << (len(starts) - 1).bit_length()
    cu_seqlens = torch.full((sequences + 1,), offset, dtype=torch.int32)
    cu_seqlens[: len(starts)] = torch.tensor(starts, dtype=torch.int32)
    more = {name: torch.cat([_inputs(row)[name] for row in rows])[None] for name in _inputs(rows[0])}
    return {"input_ids": input_ids[None], "labels": labels[None], "cu_seqlens": cu_seqlens, **more}
