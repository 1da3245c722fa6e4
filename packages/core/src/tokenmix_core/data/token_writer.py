"""Write a token file in steps, so that another writer can continue after a kill."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np

from tokenmix_core._utils.atomic_io import remove, sync, sync_tree, write_atomically, writing
from tokenmix_core._utils.locks import FolderLock
from tokenmix_core.data.token_file import (
    DOCUMENTS,
    FORMAT,
    META,
    TOKENS,
    TokenFileMeta,
    file_sha256,
    map_tokens,
    token_dtype,
)

P = ParamSpec("P")
T = TypeVar("T")
_SPLITS = ("train", "held_out")
# a document with more tokens than this is split if it alone would be held out; minimum number of tokens held out from
# its end
_LARGE_DOCUMENT, _LEAST_HELD_OUT = 2**18, 2**14


def _least(tokens: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Return a mask of the documents between `edges` `[N, 2]` with the smallest hash; all False if all are equal."""
    hashes = [hashlib.sha256(tokens[start:stop].tobytes()).digest() for start, stop in edges]
    least = min(hashes)
    chosen = np.array([each == least for each in hashes])
    return chosen & ~chosen.all()


def _hold_out_one(
    tokens: np.ndarray, lengths: np.ndarray, share: float, eos_token_id: int
) -> tuple[dict[str, list[np.ndarray]], dict[str, np.ndarray]]:
    """Hold out the documents, or the part of a large document, that `finish` describes.

    Return the tokens and the documents' lengths of both splits.
    """
    ends = np.cumsum(lengths)
    edges = np.stack([ends - lengths, ends], 1)
    moved = np.array([True]) if len(lengths) == 1 else _least(tokens, edges)
    large = moved.sum() == 1 and lengths[moved][0] > max(_LARGE_DOCUMENT, share * len(tokens))
    if len(lengths) == 1 and not large:
        moved[:] = False
    # `cut` alternates between tokens that stay and tokens that are moved to the held-out part
    cut = np.split(tokens, edges[moved].ravel())
    stay, go, left, gone = cut[0::2], cut[1::2], lengths[~moved], lengths[moved]
    if large:
        (document,), index = go, int(np.flatnonzero(moved)[0])
        at = len(document) - max(_LEAST_HELD_OUT, int(share * len(tokens)))
        # both parts become documents, so the first part needs an end token too
        stay[1:1] = [document[:at], np.array([eos_token_id], tokens.dtype)]
        go, gone = [document[at:]], np.array([len(document) - at])
        left = np.insert(left, index, at + 1)
    return {"train": stay, "held_out": go}, {"train": left, "held_out": gone}


def _told(method: Callable[Concatenate[TokenFileWriter, P], T]) -> Callable[Concatenate[TokenFileWriter, P], T]:
    """Decorate a method: an error while writing becomes one sentence with the folder and its free space."""

    @functools.wraps(method)
    def call(self: TokenFileWriter, *args: P.args, **options: P.kwargs) -> T:
        with writing("the corpus", self.partial):
            return method(self, *args, **options)

    return call


class TokenFileWriter:
    """Writes a token file into the folder `<path>.partial`, which is renamed to `path` when it is complete.

    `commit` flushes the documents appended so far to disk; another writer with the same settings continues after the
    last commit. In that writer `consumed` is the number of the source's rows before that commit, `skipped` the number
    of bad rows among them, and `kinds` the number of documents of each kind of file, which the caller counts.

    Args:
        path: the folder to make.
        settings: all settings on which the tokens depend; a partial file with other settings is refused.
        vocab_size: size of the vocabulary, which decides between uint16 and uint32.

    Raises:
        ValueError: `path` exists, the partial file is damaged or has other settings, or another process is writing it.
    """

    _PARTS = ("train.tokens", "train.lengths", "held_out.tokens", "held_out.lengths")

    def __init__(self, path: str | Path, settings: Mapping[str, Any], vocab_size: int) -> None:
        self.path = Path(path)
        self.partial = self.path.with_name(self.path.name + ".partial")
        self.settings = json.loads(json.dumps(dict(settings)))
        self.vocab_size = vocab_size
        self.dtype = token_dtype(vocab_size)
        self.consumed = self.skipped = 0
        self.kinds: Counter[str] = Counter()
        if self.path.exists() or self.path.is_symlink():
            raise ValueError(f"{self.path} exists already; choose another folder or remove it")
        self._lock = FolderLock(self.partial, "preparing a corpus")
        self._lock.acquire()
        try:
            sizes = self._read_progress()
        except BaseException:
            self._lock.release()
            raise
        self._files = {name: open(self.partial / name, "ab") for name in self._PARTS}  # noqa: SIM115
        for name, size in sizes.items():
            self._files[name].truncate(size)
        self._sizes, self._length = dict(sizes), 0
        self.tokens = (sizes["train.tokens"] + sizes["held_out.tokens"]) // self.dtype.itemsize

    def _read_progress(self) -> dict[str, int]:
        try:
            progress = json.loads((self.partial / "progress.json").read_text())
            old, sizes = dict(progress["settings"]), {name: int(progress["sizes"][name]) for name in self._PARTS}
            self.consumed, self.skipped = int(progress["consumed"]), int(progress["skipped"])
            self.kinds = Counter(progress.get("kinds", {}))
        except FileNotFoundError:
            return dict.fromkeys(self._PARTS, 0)
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{self.partial} is damaged: its progress.json cannot be read; remove it") from error
        if old != self.settings:
            new = self.settings
            changed = sorted(k for k in {*old, *new} if old.get(k) != new.get(k))
            told = "; ".join(f"{k} was {old.get(k)!r} and is {new.get(k)!r}" for k in changed)
            raise ValueError(f"{self.partial} was begun with other settings ({told}); remove it to begin again")
        for name, size in sizes.items():
            there = (self.partial / name).stat().st_size if (self.partial / name).is_file() else 0
            if there < size:
                raise ValueError(
                    f"{self.partial} is damaged: {name} has {there} bytes, expected at least {size}; remove it"
                )
        return sizes

    def append(self, documents: Sequence[Sequence[int]], held_out: Sequence[bool]) -> None:
        """Append documents and their end tokens; `held_out` has one value for each document."""
        for document, held in zip(documents, held_out, strict=True):
            self.add(np.asarray(document), held_out=held)
            self.end_document(held_out=held)

    @_told
    def add(self, tokens: np.ndarray, *, held_out: bool) -> None:
        """Append tokens to the current document; `held_out` must have the same value until the document ends."""
        self._files[f"{_SPLITS[held_out]}.tokens"].write(tokens.astype(self.dtype, copy=False).tobytes())
        self._length += len(tokens)

    @_told
    def end_document(self, *, held_out: bool) -> None:
        """End the current document, which `add` has written, as one of the held-out or of the training documents."""
        self._files[f"{_SPLITS[held_out]}.lengths"].write(self._length.to_bytes(8, "little"))
        self._sizes[f"{_SPLITS[held_out]}.tokens"] += self._length * self.dtype.itemsize
        self._sizes[f"{_SPLITS[held_out]}.lengths"] += 8
        self.tokens += self._length
        self._length = 0

    @_told
    def commit(self, consumed: int, skipped: int = 0) -> None:
        """Flush the appended documents to disk, with the counts of source rows read so far and of bad ones."""
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        self.consumed, self.skipped = consumed, skipped
        # `_sizes` does not include a document that has not ended
        progress = {"settings": self.settings, "consumed": consumed, "skipped": skipped, "sizes": self._sizes}
        progress["kinds"] = dict(self.kinds)
        write_atomically(self.partial / "progress.json", json.dumps(progress))

    @_told
    def finish(
        self,
        *,
        eos_token_id: int,
        tokenizer: str,
        fingerprint: str,
        source: Mapping[str, Any],
        hold_out: float = 0.0,
    ) -> TokenFileMeta:
        """Join the two splits, write offsets and meta, and rename the folder to its final name.

        If `hold_out` is not 0 but no document was held out, then hold out the document with the smallest hash, and
        documents equal to it, unless all documents are equal. If this is one document and it is large (more than 2**18
        tokens and more than the fraction `hold_out` of all), hold out only its last tokens. The only document of a file
        is held out only in this way.
        """
        self._close_files()
        lengths = {s: np.fromfile(self.partial / f"{s}.lengths", "<i8") for s in _SPLITS}
        parts = {split: [map_tokens(self.partial / f"{split}.tokens", self.dtype)] for split in lengths}
        if hold_out and len(lengths["train"]) and not len(lengths["held_out"]):
            parts, lengths = _hold_out_one(parts["train"][0], lengths["train"], hold_out, eos_token_id)
        # write to another folder: a process killed from here on then leaves the committed files unchanged
        whole = self.partial / "whole"
        remove(whole)
        whole.mkdir()
        with open(whole / TOKENS, "wb") as file:
            for part in itertools.chain(*parts.values()):
                part.tofile(file)
        offsets = np.concatenate([[0], np.cumsum(np.concatenate(list(lengths.values())))])
        np.save(whole / DOCUMENTS, offsets.astype(np.int64))
        meta = TokenFileMeta(
            format=FORMAT,
            dtype=self.dtype.str,
            tokens=int(offsets[-1]),
            documents=len(offsets) - 1,
            held_out_tokens=int(lengths["held_out"].sum()),
            held_out_documents=len(lengths["held_out"]),
            vocab_size=self.vocab_size,
            eos_token_id=eos_token_id,
            tokenizer=tokenizer,
            tokenizer_fingerprint=fingerprint,
            source=dict(source),
            sha256={name: file_sha256(whole / name) for name in (TOKENS, DOCUMENTS)},
        )
        write_atomically(whole / META, json.dumps(asdict(meta), indent=2) + "\n")
        sync_tree(whole)
        os.rename(whole, self.path)
        # remove the partial files only after the whole file is on disk
        sync(self.path.parent)
        shutil.rmtree(self.partial)
        self._lock.release()
        return meta

    def _close_files(self) -> None:
        for file in self._files.values():
            file.close()

    def close(self) -> None:
        """Close the open files; another writer can continue after the last commit."""
        self._close_files()
        self._lock.release()

    def discard(self) -> None:
        """Remove all files that were written."""
        self._close_files()
        shutil.rmtree(self.partial, ignore_errors=True)
        self._lock.release()
