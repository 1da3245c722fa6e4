"""Training rows: fixed chunks of token files and synthetic tasks, in an order that the seed and the epoch decide.

Row i of a run is a function of the recipe and of i alone. Whoever asks for rows i, i + 1, … goes on exactly where
another run, killed at i, would have gone on, on any number of processes, without reading what came before.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, NotRequired, TypedDict

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor
from torch.utils.data import Dataset

from tokenmix_core import synthetic
from tokenmix_core.corpora.token_file import TokenFile
from tokenmix_core.streams import stream

IGNORE_INDEX = synthetic.IGNORE_INDEX
_BLOCK = 1000


# from a row's index, further inputs of the model by name, one value a token
RowInputs = Callable[[int], dict[str, Tensor]]


class Row(TypedDict):
    """A row of T tokens.

    Attributes:
        input_ids, labels: `[T]` int64.
        borders: where documents begin inside the row.
        inputs: by name, further inputs of the model, `[T, ...]`.
    """

    input_ids: Int[Tensor, "T"]
    labels: Int[Tensor, "T"]
    borders: Int[np.ndarray, "n"]
    inputs: NotRequired[dict[str, Tensor]]


def permuted(index: int, size: int, key: Sequence[int]) -> int:
    """The image of `index` under a random permutation of `range(size)` that `key` chooses; no table is kept.

    Four rounds of a Feistel network over the next even number of bits; images outside the range are mapped again.
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
    """The chunks `[i·T, (i + 1)·T)` of a token file, shuffled anew in every epoch; row i belongs to epoch i // chunks.

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
        ids = torch.from_numpy(self.file.tokens[start:stop].astype(np.int64))
        return {"input_ids": ids, "labels": ids.clone(), "borders": self.file.borders(start, stop)}


class MQARRows(Dataset):
    """Multi-query associative recall without end; see `tokenmix_core.synthetic.mqar`.

    An example has P = 2, 4, 8, ... or `max_pairs` pairs, each number as often, and 4P, 8P, 16P, ... or at most T
    tokens, 16 at least. Recall is learnt from few pairs in short examples and then holds for more: over the first
    `ramp_rows` rows the larger numbers join one by one, sooner and sooner, and no example is longer than 16 times the
    largest.

    Args:
        seq_len: T, the tokens of a row.
        max_pairs: the most pairs in an example.
        vocab_size: of keys, values and filler.
        seed: rows are a function of the seed and their index.
        packed: fill a row with examples of one size, with borders between them; else each has T tokens and a row of
            its own.
        ramp_rows: rows until all sizes occur; 0 for at once.

    Raises:
        ValueError: sizes that leave no room.
    """

    def __init__(
        self, seq_len: int, max_pairs: int, vocab_size: int, seed: int, *, packed: bool = True, ramp_rows: int = 0
    ) -> None:
        self.seq_len, self.packed, self.ramp_rows = seq_len, packed, ramp_rows
        self.options: dict[str, Any] = {"vocab_size": vocab_size, "seed": seed}
        self.pairs = [max_pairs >> i for i in range(max_pairs.bit_length()) if max_pairs >> i >= 2] or [max_pairs]
        self.pairs.sort()
        # bad sizes are told before training begins
        synthetic.mqar(1, seq_len=seq_len, num_pairs=max_pairs, **self.options)

    def __getitem__(self, index: int) -> Row:
        rng = stream("mqar rows", self.options["seed"], index)
        joined, longest = self.pairs, self.seq_len
        if index < self.ramp_rows:
            joined = joined[: 1 + index**2 * len(joined) // self.ramp_rows**2]
            longest = min(longest, 16 * joined[-1])
        pairs = int(rng.choice(joined))
        length = self.seq_len
        if self.packed:
            shortest = min(longest, max(16, 4 * pairs))
            length = shortest << int(rng.integers((longest // shortest).bit_length()))
        count, rest = divmod(self.seq_len, length)
        first, options = index * self.seq_len, {"num_pairs": pairs, **self.options}
        # the last example takes what is left of the row
        parts = (
            synthetic.mqar(count - 1, seq_len=length, first=first, **options),
            synthetic.mqar(1, seq_len=length + rest, first=first + count - 1, **options),
        )
        input_ids, labels = (torch.cat([x.flatten() for x in column]) for column in zip(*parts, strict=True))
        return {"input_ids": input_ids, "labels": labels, "borders": np.arange(1, count, dtype=np.int64) * length}


class NiahRows(Dataset):
    """Needles in haystacks without end: the prompt, its answer, the end token, and padding by it; the answer is scored.

    Args:
        task: "s-niah-1", "s-niah-2" or "s-niah-3".
        tokenizer: turns the text into tokens.
        text: running text to hide needles in, for the second and third task.
        seq_len: T.
        seed: rows are a function of the seed and their index.
    """

    def __init__(self, task: str, tokenizer: Any, text: TokenFile | None, seq_len: int, seed: int) -> None:
        self.task, self.tokenizer, self.text, self.seq_len, self.seed = task, tokenizer, text, seq_len, seed
        self[0]

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def __getitem__(self, index: int) -> Row:
        rng = stream("niah rows", self.seed, index)
        words: list[str] = []
        if self.text is not None:
            start = rng.integers(max(1, len(self.text) - 2 * self.seq_len))
            words = self.tokenizer.decode(self.text.tokens[start : start + 2 * self.seq_len].tolist()).split()
        example = synthetic.niah(
            self.task,
            max_tokens=self.seq_len - 1,
            count_tokens=lambda text: len(self._encode(text)),
            depth=float(rng.random()),
            haystack=words,
            seed=self.seed,
            index=index,
        )
        eos = self.tokenizer.eos_token_id
        prompt = self._encode(example.context + example.question)
        answer = [*self._encode(" " + example.answer), eos]
        ids = torch.full((self.seq_len,), eos)
        labels = torch.full((self.seq_len,), IGNORE_INDEX)
        end = len(prompt) + len(answer)
        ids[:end] = torch.tensor(prompt + answer)
        labels[len(prompt) : end] = torch.tensor(answer)
        return {"input_ids": ids, "labels": labels, "borders": np.zeros(0, dtype=np.int64)}


class MixedRows(Dataset):
    """`length` rows taken from several datasets in fixed shares.

    Every block of 1,000 rows holds the same number of each dataset's rows, in one random order; a dataset's own rows
    are taken in their order. `inputs` adds further inputs of the model to a row, a function of its index alone.

    Raises:
        ValueError: weights that are not positive, or so small that a block has no row of theirs.
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
            raise ValueError(f"weights must be {len(datasets)} positive numbers, one for each source, got {weights}")
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

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Row:
        block, place = divmod(index, _BLOCK)
        chosen = self.pattern[place]
        row = self.datasets[chosen][int(block * self.counts[chosen] + self.rank[place])]
        return row if self.inputs is None else Row(**{**row, "inputs": self.inputs(index)})


def _inputs(row: Row) -> dict[str, Tensor]:
    return row.get("inputs", {})


def collate_joined(rows: Sequence[Row]) -> dict[str, Tensor]:
    """A batch `[B, T]` in which the documents of a row see each other. The first token of a row is never predicted."""
    labels = torch.stack([row["labels"] for row in rows])
    labels[:, 0] = IGNORE_INDEX
    more = {name: torch.stack([_inputs(row)[name] for row in rows]) for name in _inputs(rows[0])}
    return {"input_ids": torch.stack([row["input_ids"] for row in rows]), "labels": labels, **more}


def collate_separate(rows: Sequence[Row]) -> dict[str, Tensor]:
    """A packed batch `[1, B·T]` in which no document sees another.

    `cu_seqlens` holds the borders of rows and documents. It is filled up with empty sequences to a power of two plus
    one, so that a compiled model meets few shapes. The first token of a sequence is never predicted: what would
    predict it belongs to another document.
    """
    input_ids = torch.cat([row["input_ids"] for row in rows])
    labels = torch.cat([row["labels"] for row in rows])
    starts, offset = [], 0
    for row in rows:
        starts += [offset, *(offset + row["borders"]).tolist()]
        offset += len(row["input_ids"])
    labels[torch.tensor(starts)] = IGNORE_INDEX
    sequences = 1 << (len(starts) - 1).bit_length()
    cu_seqlens = torch.full((sequences + 1,), offset, dtype=torch.int32)
    cu_seqlens[: len(starts)] = torch.tensor(starts, dtype=torch.int32)
    more = {name: torch.cat([_inputs(row)[name] for row in rows])[None] for name in _inputs(rows[0])}
    return {"input_ids": input_ids[None], "labels": labels[None], "cu_seqlens": cu_seqlens, **more}
