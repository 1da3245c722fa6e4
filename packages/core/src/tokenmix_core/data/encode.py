"""Tokenize a stream of texts in one or several processes; the number of processes does not change the tokens."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

import numpy as np

from tokenmix_core._utils.trust import is_trusted, trusting
from tokenmix_core.data.token_file import token_dtype
from tokenmix_core.data.tokenizer import BYTES, PROBE, encode_texts, load_tokenizer

# number of characters in a batch; number of batches that a stream must have for worker processes to be started
_BATCH_CHARS, _FIRST_BATCHES = 2**18, 16
# maximum number of batches per worker process that wait to be encoded or written
_AHEAD = 3
Encode = Callable[[Sequence[str]], list[np.ndarray]]


class HasText(Protocol):
    """An item of the stream to encode.

    Attributes:
        text: the text to encode; an empty text has no tokens.
        ends_batch: whether a batch ends with this item. If a single process encodes, it then yields the item before it
            reads the next one from the stream.
    """

    @property
    def text(self) -> str: ...

    @property
    def ends_batch(self) -> bool: ...


Item = TypeVar("Item", bound=HasText)


@dataclass(frozen=True)
class Encoding:
    """A tokenizer as plain data, from which a worker process can load it.

    Attributes:
        form: "bytes" for the built-in tokenizer, "backend" for a serialised tokenizer of the library `tokenizers`, or
            "name" for one that `load_tokenizer` loads by its name.
        content: the serialised tokenizer ("backend") or the tokenizer's name ("name"); empty for "bytes".
        special_tokens: whether text that spells a special token, such as "<|endoftext|>", becomes that token.
        dtype: dtype of the tokens.
        trusted: whether the tokenizer's own Python code may run.
    """

    form: Literal["bytes", "backend", "name"]
    content: str
    special_tokens: bool
    dtype: str
    trusted: bool = False

    def load(self) -> Encode:
        """Return the tokenizer's function that encodes texts."""
        if self.form == "bytes":
            return lambda texts: [np.frombuffer(text.encode(), np.uint8).astype(self.dtype) for text in texts]
        if self.form == "backend":
            return self._load_backend()
        with trusting(self.trusted):
            tokenizer = load_tokenizer(self.content)
        return lambda texts: [
            np.asarray(ids, self.dtype) for ids in encode_texts(tokenizer, texts, special_tokens=self.special_tokens)
        ]

    def _load_backend(self) -> Encode:
        from tokenizers import Tokenizer

        backend: Any = Tokenizer.from_str(self.content)
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = not self.special_tokens

        def encoded(texts: Sequence[str]) -> list[np.ndarray]:
            # use `encode_batch`, because encode_batch_fast takes 1.4 times as long
            with _one_thread():
                return [
                    np.asarray(x.ids, self.dtype) for x in backend.encode_batch(list(texts), add_special_tokens=False)
                ]

        return encoded


def encoding_of(name: str, tokenizer: Any, *, special_tokens: bool = False) -> Encoding:
    """Return a tokenizer as plain data, from which worker processes can load it.

    Args:
        name: the name by which the tokenizer was loaded.
        tokenizer: the tokenizer.
        special_tokens: whether text that spells a special token becomes that token.

    Raises:
        ValueError: `special_tokens` is False, but the tokenizer always turns such text into the special token.
    """
    special_tokens = special_tokens and not tokenizer.split_special_tokens
    about: dict[str, Any] = {"special_tokens": special_tokens, "dtype": token_dtype(len(tokenizer)).str}
    if name == BYTES:
        return Encoding("bytes", "", **about)
    spelled = {text: tokenizer.convert_tokens_to_ids(text) for text in tokenizer.all_special_tokens}
    spelled.pop(tokenizer.unk_token, None)
    probes = [PROBE, *(f"a{text}b {text}" for text in spelled)]
    expected = encode_texts(tokenizer, probes, special_tokens=special_tokens)
    if not special_tokens:
        for (text, token), ids in zip(spelled.items(), expected[1:], strict=True):
            if token in ids:
                raise ValueError(
                    f"tokenizer {name!r} turns text that spells {text!r} into that special token whatever its options; "
                    "--special-tokens accepts that"
                )
    if (backend := getattr(tokenizer, "backend_tokenizer", None)) is not None:
        encoding = Encoding("backend", backend.to_str(), **about)
        if all(np.array_equal(a, b) for a, b in zip(encoding.load()(probes), expected, strict=True)):
            return encoding
    return Encoding("name", name, trusted=is_trusted(), **about)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Context manager: the library `tokenizers` uses one thread, so that only `workers` determines the cores in use."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def encode_stream(
    items: Iterable[Item], encoding: Encoding, workers: int
) -> Generator[tuple[Item, np.ndarray], None, None]:
    """Yield each item with the tokens of its text, in the order of the items.

    Args:
        items: items with a `text`, of a few MB at most.
        encoding: the tokenizer.
        workers: number of worker processes; with 1, or for a short stream, this process itself encodes.

    Raises:
        OSError: a worker process was killed.
    """
    batches = _batched(items)
    first = list(itertools.islice(batches, _FIRST_BATCHES)) if workers > 1 else []
    if len(first) < _FIRST_BATCHES:
        encode = encoding.load()
        for batch in itertools.chain(first, batches):
            yield from _joined(batch, encode([item.text for item in batch if item.text]))
        return
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, context, initializer=_start, initargs=(encoding,))
    pending: deque[tuple[list[Item], Future[tuple[np.ndarray, np.ndarray]]]] = deque()
    try:
        for batch in itertools.chain(first, batches):
            pending.append((batch, pool.submit(_encode, [item.text for item in batch if item.text])))
            if len(pending) > _AHEAD * workers:
                yield from _result(*pending.popleft())
        while pending:
            yield from _result(*pending.popleft())
    except BrokenProcessPool as error:
        raise OSError(
            "a process that tokenizes was killed, often for lack of memory; the same command continues, perhaps with "
            "fewer --workers"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _batched(items: Iterable[Item]) -> Iterator[list[Item]]:
    batch: list[Item] = []
    size = 0
    for item in items:
        batch.append(item)
        size += len(item.text) + 1
        if size >= _BATCH_CHARS or item.ends_batch:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _joined(batch: list[Item], tokens: Iterable[np.ndarray]) -> Iterator[tuple[Item, np.ndarray]]:
    found, nothing = iter(tokens), np.zeros(0, np.uint8)
    return ((item, next(found) if item.text else nothing) for item in batch)


def _result(batch: list[Item], future: Future) -> Iterator[tuple[Item, np.ndarray]]:
    tokens, ends = future.result()
    return _joined(batch, np.split(tokens, ends[:-1]) if len(ends) else [])


# the function that encodes, in a worker process; empty in the main process
_worker: list[Encode] = []


def _start(encoding: Encoding) -> None:
    """Load the tokenizer in a worker process; it ignores Ctrl-C, which its parent handles, and ends with its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
    _worker[:] = [encoding.load()]


def _encode(texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
    found = _worker[0](texts)
    ends = np.cumsum([len(x) for x in found])
    return (np.concatenate(found) if found else np.zeros(0, np.uint8)), ends


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
