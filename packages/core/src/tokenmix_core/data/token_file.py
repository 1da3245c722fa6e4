"""A corpus as one memory-mapped file of tokens; the module `token_writer` writes it.

A token file is a folder with

- `tokens.bin`: the tokens of all documents, one after the other, little-endian uint16 (uint32 for vocabularies past
  65,536), every document ended by the tokenizer's end token; the held-out documents come last;
- `documents.npy`: int64 `[N + 1]`, where each document begins, and the end of the last;
- `meta.json`: counts, the tokenizer's fingerprint, where the text came from, and the sha256 of the two other files.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tokenmix_core._utils.atomic_io import write_atomically
from tokenmix_core._utils.validation import check_fields

FORMAT = "tokenmix-tokens-1"
TOKENS, DOCUMENTS, META = "tokens.bin", "documents.npy", "meta.json"
_STAMP = ".verified"
# dtypes of tokens: for vocabularies of up to 65,536 tokens, and for larger ones
_DTYPES = ("<u2", "<u4")


@dataclass(frozen=True)
class TokenFileMeta:
    """The fields of `meta.json`; held-out documents are the last ones in the file."""

    format: str
    dtype: str
    tokens: int
    documents: int
    held_out_tokens: int
    held_out_documents: int
    vocab_size: int
    eos_token_id: int
    tokenizer: str
    tokenizer_fingerprint: str
    source: dict[str, Any]
    sha256: dict[str, str]

    def __post_init__(self) -> None:
        check_fields(self, TokenFileMeta)
        if self.dtype not in _DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(map(repr, _DTYPES))}, got {self.dtype!r}")
        if sorted(self.sha256) != sorted((TOKENS, DOCUMENTS)):
            raise ValueError(f"sha256 must be of {TOKENS} and {DOCUMENTS}, got {', '.join(self.sha256) or 'none'}")
        for part, whole in (("held_out_documents", "documents"), ("held_out_tokens", "tokens")):
            if not 0 <= getattr(self, part) <= getattr(self, whole):
                raise ValueError(f"{part} must be from 0 to {whole}={getattr(self, whole)}, got {getattr(self, part)}")
        if min(self.eos_token_id, self.vocab_size) < 0:
            raise ValueError(
                f"eos_token_id and vocab_size must be at least 0, got {self.eos_token_id} and {self.vocab_size}"
            )


class TokenFile:
    """A token file, opened for reading.

    Args:
        path: the folder of `tokens.bin`, `documents.npy` and `meta.json`.
        split: "train", "held_out", or "all" for both.
        fingerprint: fingerprint of the reader's tokenizer, which must be the file's; None accepts any tokenizer.
        verify: whether to compare the sha256 of `tokens.bin` and `documents.npy` with those in `meta.json`; this is
            skipped if they were compared after their last change.

    Attributes:
        tokens: the tokens of the split, `[tokens]`, memory-mapped.
        documents: start of each document of the split in `tokens`, then the end of the last document, `[N + 1]`.
        meta: the content of `meta.json`.

    Raises:
        ValueError: the folder is no token file, is damaged or truncated, or was made by another tokenizer.
    """

    def __init__(
        self, path: str | Path, split: str = "train", *, fingerprint: str | None = None, verify: bool = True
    ) -> None:
        if split not in ("train", "held_out", "all"):
            raise ValueError(f"split must be 'train', 'held_out' or 'all', got {split!r}")
        self.path = Path(path)
        self.meta = _read_meta(self.path)
        if fingerprint is not None and self.meta.tokenizer_fingerprint != fingerprint:
            raise ValueError(
                f"{self.path} was prepared with the tokenizer {self.meta.tokenizer!r} "
                f"(fingerprint {self.meta.tokenizer_fingerprint[:12]}), which is not the one expected here "
                f"(fingerprint {fingerprint[:12]}); prepare the corpus again with the tokenizer of the recipe"
            )
        dtype = np.dtype(self.meta.dtype)
        _check_size(self.path / TOKENS, self.meta.tokens * dtype.itemsize)
        if verify:
            _verify(self.path, self.meta)
        tokens = map_tokens(self.path / TOKENS, dtype)
        documents = _read_offsets(self.path / DOCUMENTS, self.meta)
        boundary = self.meta.documents - self.meta.held_out_documents
        first, last = {"train": (0, boundary), "held_out": (boundary, None), "all": (0, None)}[split]
        kept = documents[first : None if last is None else last + 1]
        self.documents = np.asarray(kept) - kept[0]
        self._first = int(kept[0])
        self.tokens = tokens[kept[0] : kept[-1]]

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def fingerprint(self) -> str:
        """A string that identifies the tokens, the documents' starts and the number of held-out documents."""
        tokens, documents = self.meta.sha256[TOKENS], self.meta.sha256[DOCUMENTS]
        return f"{tokens} documents {documents} held out {self.meta.held_out_documents}"

    @property
    def num_documents(self) -> int:
        """Number of documents of the split."""
        return len(self.documents) - 1

    def document(self, index: int) -> np.ndarray:
        """Return the tokens of one document, including its end token."""
        return self.read(int(self.documents[index]), int(self.documents[index + 1]))

    def read(self, start: int, stop: int) -> np.ndarray:
        """Read tokens `start` to `stop` without a memory map, which would end the process if the file had shrunk.

        Raises:
            ValueError: the file was truncated after it was opened.
        """
        start, stop, _ = slice(start, stop).indices(len(self))
        count, dtype = max(0, stop - start), self.tokens.dtype
        found = np.fromfile(self.path / TOKENS, dtype, count, offset=(self._first + start) * dtype.itemsize)
        if len(found) < count:
            _check_size(self.path / TOKENS, self.meta.tokens * dtype.itemsize)
        return found

    def boundaries(self, start: int, stop: int) -> np.ndarray:
        """Return the starts, relative to `start`, of the documents that begin after `start` and before `stop`."""
        first, last = np.searchsorted(self.documents, (start + 1, stop))
        return self.documents[first:last] - start


def _read_meta(path: Path) -> TokenFileMeta:
    if not path.is_dir():
        raise ValueError(f"{path} is no token file: expected a folder with {TOKENS}, {DOCUMENTS} and {META}")
    missing = [name for name in (META, TOKENS, DOCUMENTS) if not (path / name).is_file()]
    if missing:
        raise ValueError(f"{path} is no complete token file: it lacks {', '.join(missing)}")
    try:
        content = json.loads((path / META).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path / META} is not valid JSON: {error}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        got = content.get("format") if isinstance(content, dict) else type(content).__name__
        raise ValueError(f"{path / META} must have format {FORMAT!r}, got {got!r}")
    try:
        return TokenFileMeta(**content)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path / META} does not hold what a token file's must: {error}") from error


def _read_offsets(path: Path, meta: TokenFileMeta) -> np.ndarray:
    try:
        offsets = np.load(path, mmap_mode="r")
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if not isinstance(offsets, np.ndarray) or offsets.dtype != np.int64 or offsets.shape != (meta.documents + 1,):
        got = f"{offsets.dtype} {list(offsets.shape)}" if isinstance(offsets, np.ndarray) else type(offsets).__name__
        raise ValueError(f"{path} does not belong to its {META}: expected int64 [{meta.documents + 1}], got {got}")
    if offsets[0] != 0 or offsets[-1] != meta.tokens or (offsets[1:] < offsets[:-1]).any():
        raise ValueError(
            f"{path} does not belong to its {META}: expected offsets that rise from 0 to {meta.tokens} tokens, "
            f"got {offsets[0]} to {offsets[-1]}"
        )
    if (held_out := offsets[-1] - offsets[-1 - meta.held_out_documents]) != meta.held_out_tokens:
        raise ValueError(
            f"{path} does not belong to its {META}: expected {meta.held_out_tokens} held-out tokens, got {held_out}"
        )
    return offsets


def _check_size(path: Path, expected: int) -> None:
    size = path.stat().st_size
    if size != expected:
        state = "truncated" if size < expected else "too long"
        raise ValueError(f"{path} is {state}: expected {expected} bytes, got {size}")


def _verify(path: Path, meta: TokenFileMeta) -> None:
    stamp = {name: [os.stat(path / name).st_mtime_ns, os.stat(path / name).st_size] for name in meta.sha256}
    try:
        if json.loads((path / _STAMP).read_text()) == stamp:
            return
    except (OSError, ValueError):
        pass
    for name, expected in meta.sha256.items():
        if (got := file_sha256(path / name)) != expected:
            raise ValueError(f"{path / name} is damaged: its sha256 is {got[:12]}…, {META} says {expected[:12]}…")
    # in a read-only folder the result of the check cannot be stored; the next reader checks again
    with contextlib.suppress(OSError):
        write_atomically(path / _STAMP, json.dumps(stamp))


def file_sha256(path: str | Path) -> str:
    """Return the sha256 of a file's content as a hexadecimal string."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def map_tokens(path: Path, dtype: np.dtype) -> np.ndarray:
    """Return the tokens of a file as a read-only memory map."""
    # an empty file cannot be mapped
    return np.memmap(path, dtype, mode="r") if path.stat().st_size else np.zeros(0, dtype)


def token_dtype(vocab_size: int) -> np.dtype:
    """Return the dtype of tokens in a file for a vocabulary of this size."""
    return np.dtype(_DTYPES[vocab_size > 2**16])
