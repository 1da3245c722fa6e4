"""The text that suites measure on, as documents, words or tokens."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

from tokenmix_core.data.prepare import BUILT_IN_HELD_OUT, built_in_corpus, is_held_out
from tokenmix_core.data.sources import STDLIB, open_source, stdlib_source
from tokenmix_core.data.token_file import META, TokenFile
from tokenmix_core.data.tokenizer import byte_tokenizer, tokenizer_fingerprint

BUILT_IN_TEXT = "built-in corpus, held-out part"


def text_vocab_size(model: Any) -> int:
    """The number of logits of a causal language model."""
    return model.get_output_embeddings().weight.shape[0]


def as_token_file(text: str | None, tokenizer: Any) -> Path | None:
    """The token file that a text is, if it is one; the built-in corpus is one for the byte tokenizer."""
    if text is not None and (Path(text) / META).is_file():
        return Path(text)
    if text in (None, STDLIB) and tokenizer_fingerprint(tokenizer) == tokenizer_fingerprint(byte_tokenizer()):
        return built_in_corpus()
    return None


def documents(text: str | None, tokenizer: Any) -> Iterator[str]:
    """The documents of a text.

    Args:
        text: a token file (its held-out documents are decoded), a text, JSONL or parquet file, a folder of them, a
            dataset, or None for the held-out part of the built-in corpus.
        tokenizer: what a token file must have been made with.

    Raises:
        ValueError: there is no such text, or it cannot be read.
    """
    if text in (None, STDLIB):
        return (d for d in stdlib_source().documents(0) if is_held_out(d, BUILT_IN_HELD_OUT))
    if path := as_token_file(text, tokenizer):
        file = TokenFile(path, "held_out", fingerprint=tokenizer_fingerprint(tokenizer))
        ids = (file.document(i) for i in range(file.num_documents))
        return (tokenizer.decode(document, skip_special_tokens=True) for document in ids)
    return open_source(text).documents(0)


def words(text: str | None, tokenizer: Any, count: int) -> list[str]:
    """The first `count` words of a text, fewer if it is shorter."""
    stream = (word for document in documents(text, tokenizer) for word in document.split())
    return list(itertools.islice(stream, count))


def text_tokens(text: str | None, tokenizer: Any, count: int) -> Int[np.ndarray, "n"]:
    """The first `count` tokens of a text, fewer if it is shorter; each document is ended by the end token.

    Raises:
        ValueError: there is no such text, it was prepared with another tokenizer, or it is empty.
    """
    if path := as_token_file(text, tokenizer):
        return np.asarray(TokenFile(path, "held_out", fingerprint=tokenizer_fingerprint(tokenizer)).tokens[:count])
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    pieces: list[np.ndarray] = []
    missing = count
    for document in documents(text, tokenizer):
        if missing <= 0:
            break
        # a token is seldom longer than 16 characters, so that a huge document is not tokenized in vain
        ids = tokenizer(document[: 16 * missing + 16], add_special_tokens=False, verbose=False)["input_ids"]
        pieces.append(np.asarray([*ids, *end], dtype=np.int64)[:missing])
        missing -= len(pieces[-1])
    if not pieces:
        raise ValueError(f"the text {text!r} holds no document")
    return np.concatenate(pieces)


def training_tokens(text: str | None, tokenizer: Any) -> Int[np.ndarray, "n"] | None:
    """The training part of a text whose held-out part `text_tokens` gives; None where there is no such split."""
    path = as_token_file(text, tokenizer)
    return TokenFile(path, "train", fingerprint=tokenizer_fingerprint(tokenizer)).tokens if path else None


def bytes_per_token(sequences: Int[np.ndarray, "N T"], tokenizer: Any) -> float:
    """UTF-8 bytes of text for each token; special tokens stand for none."""
    text = tokenizer.batch_decode(sequences, skip_special_tokens=True)
    return sum(len(t.encode("utf-8", "replace")) for t in text) / sequences.size
