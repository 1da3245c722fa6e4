"""A corpus as one memory-mapped file of tokens: reading it, and writing it so that a killed writer can go on.

A token file is a folder with

- `tokens.bin`: the tokens of all documents, one after the other, little-endian uint16 (uint32 for vocabularies past
  65,536), every document ended by the tokenizer's end token; the held-out documents come last;
- `documents.npy`: int64 `[N + 1]`, where each document begins, and the end of the last;
- `meta.json`: counts, the tokenizer's fingerprint, where the text came from, and the sha256 of both files.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import shutil
import zipfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tokenmix_core._utils.atomic_io import remove, sync, sync_tree, write_atomically
from tokenmix_core._utils.locks import FolderLock
from tokenmix_core._utils.validation import check_fields

FORMAT = "tokenmix-tokens-1"
TOKENS, DOCUMENTS, META = "tokens.bin", "documents.npy", "meta.json"
_STAMP = ".verified"
_SPLITS = ("train", "held_out")
# a document past so many tokens is not held out whole if only one is; and the fewest tokens that are held out of it
_LARGE_DOCUMENT, _LEAST_HELD_OUT = 2**18, 2**14
# of vocabularies up to 65,536 tokens, and of larger ones
_DTYPES = ("<u2", "<u4")


@dataclass(frozen=True)
class TokenFileMeta:
    """The fields of `meta.json`; the held-out documents are the last ones of the file."""

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
        path: its folder.
        split: "train", "held_out", or "all" for both.
        fingerprint: the fingerprint of the tokenizer that the reader expects; None takes any.
        verify: compare the sha256 of the contents with the recorded ones, unless that was done since the last change.

    Attributes:
        tokens: the tokens of the split, `[tokens]`, memory-mapped.
        documents: where each document of the split begins in `tokens`, and the end of the last, `[N + 1]`.
        meta: what the file says of itself.

    Raises:
        ValueError: the folder is no token file, is damaged or truncated, or was made with another tokenizer.
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
        tokens = _map(self.path / TOKENS, dtype)
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
        """What a training curve depends on: the tokens, the documents' offsets and the number of held-out documents."""
        tokens, documents = self.meta.sha256[TOKENS], self.meta.sha256[DOCUMENTS]
        return f"{tokens} documents {documents} held out {self.meta.held_out_documents}"

    @property
    def num_documents(self) -> int:
        """Documents of the split."""
        return len(self.documents) - 1

    def document(self, index: int) -> np.ndarray:
        """The tokens of one document, its end token included."""
        return self.read(int(self.documents[index]), int(self.documents[index + 1]))

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return tokens from the file itself, not from `tokens`: a memory map of a file that shrinks ends the process.

        Raises:
            ValueError: the file is truncated since it was opened.
        """
        start, stop, _ = slice(start, stop).indices(len(self))
        count, dtype = max(0, stop - start), self.tokens.dtype
        found = np.fromfile(self.path / TOKENS, dtype, count, offset=(self._first + start) * dtype.itemsize)
        if len(found) < count:
            _check_size(self.path / TOKENS, self.meta.tokens * dtype.itemsize)
        return found

    def boundaries(self, start: int, stop: int) -> np.ndarray:
        """Where documents begin strictly inside `[start, stop)`, counted from `start`."""
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
            raise ValueError(f"{path / name} is damaged: its sha256 is {got[:12]}…, {META} records {expected[:12]}…")
    # a read-only folder is checked again next time
    with contextlib.suppress(OSError):
        write_atomically(path / _STAMP, json.dumps(stamp))


def file_sha256(path: str | Path) -> str:
    """The sha256 of a file's content, in hex."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _map(path: Path, dtype: np.dtype) -> np.ndarray:
    # what is empty cannot be mapped
    return np.memmap(path, dtype, mode="r") if path.stat().st_size else np.zeros(0, dtype)


def _least(tokens: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Which of the documents between `edges`, `[N, 2]`, have the least hash; none where all are equal."""
    hashes = [hashlib.sha256(tokens[start:stop].tobytes()).digest() for start, stop in edges]
    least = min(hashes)
    chosen = np.array([each == least for each in hashes])
    return chosen & ~chosen.all()


def token_dtype(vocab_size: int) -> np.dtype:
    """Return the dtype of tokens in a file."""
    return np.dtype(_DTYPES[vocab_size > 2**16])


def _hold_out_one(
    tokens: np.ndarray, lengths: np.ndarray, share: float, eos_token_id: int
) -> tuple[dict[str, list[np.ndarray]], dict[str, np.ndarray]]:
    """Return tokens and lengths of both splits with one document held out, or the last tokens of a large one."""
    ends = np.cumsum(lengths)
    edges = np.stack([ends - lengths, ends], 1)
    moved = np.array([True]) if len(lengths) == 1 else _least(tokens, edges)
    large = moved.sum() == 1 and lengths[moved][0] > max(_LARGE_DOCUMENT, share * len(tokens))
    if len(lengths) == 1 and not large:
        moved[:] = False
    # alternately tokens that stay and tokens that are moved
    cut = np.split(tokens, edges[moved].ravel())
    stay, go, left, gone = cut[0::2], cut[1::2], lengths[~moved], lengths[moved]
    if large:
        (document,), place = go, int(np.flatnonzero(moved)[0])
        at = len(document) - max(_LEAST_HELD_OUT, int(share * len(tokens)))
        # each part is a document and has an end
        stay[1:1] = [document[:at], np.array([eos_token_id], tokens.dtype)]
        go, gone = [document[at:]], np.array([len(document) - at])
        left = np.insert(left, place, at + 1)
    return {"train": stay, "held_out": go}, {"train": left, "held_out": gone}


class TokenFileWriter:
    """Writes a token file into `<path>.partial`, which becomes `path` in one rename when all of it is there.

    `commit` makes what was appended so far durable; a writer opened again with the same settings goes on after the
    last commit, and says in `consumed` how many rows of the source that covers, in `skipped` how many were bad, and in
    `kinds` how many documents came from each kind of file; the caller counts them there.

    Args:
        path: the folder to make.
        settings: all that decides which tokens come out; a partial file with other settings is refused.
        vocab_size: decides between uint16 and uint32.

    Raises:
        ValueError: `path` exists, a partial file of other settings does, or another process is writing it.
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
            raise ValueError(f"{self.partial} was begun with other settings ({told}); remove it to begin anew")
        for name, size in sizes.items():
            there = (self.partial / name).stat().st_size if (self.partial / name).is_file() else 0
            if there < size:
                raise ValueError(
                    f"{self.partial} is damaged: {name} has {there} bytes, expected at least {size}; remove it"
                )
        return sizes

    def append(self, documents: Sequence[Sequence[int]], held_out: Sequence[bool]) -> None:
        """Append documents, each with its end token; `held_out` says which split each one goes to."""
        for document, held in zip(documents, held_out, strict=True):
            self.add(np.asarray(document), held_out=held)
            self.end_document(held_out=held)

    def add(self, tokens: np.ndarray, *, held_out: bool) -> None:
        """Append tokens to the document that is being written, which belongs to a split."""
        self._files[f"{_SPLITS[held_out]}.tokens"].write(tokens.astype(self.dtype, copy=False).tobytes())
        self._length += len(tokens)

    def end_document(self, *, held_out: bool) -> None:
        """End the document that is being written."""
        self._files[f"{_SPLITS[held_out]}.lengths"].write(self._length.to_bytes(8, "little"))
        self._sizes[f"{_SPLITS[held_out]}.tokens"] += self._length * self.dtype.itemsize
        self._sizes[f"{_SPLITS[held_out]}.lengths"] += 8
        self.tokens += self._length
        self._length = 0

    def commit(self, consumed: int, skipped: int = 0) -> None:
        """Make all that was appended durable, as the outcome of the first `consumed` rows of the source."""
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        self.consumed, self.skipped = consumed, skipped
        # without a document that is not ended
        progress = {"settings": self.settings, "consumed": consumed, "skipped": skipped, "sizes": self._sizes}
        progress["kinds"] = dict(self.kinds)
        write_atomically(self.partial / "progress.json", json.dumps(progress))

    def finish(
        self,
        *,
        eos_token_id: int,
        tokenizer: str,
        fingerprint: str,
        source: Mapping[str, Any],
        hold_out: float = 0.0,
    ) -> TokenFileMeta:
        """Join the two splits, write offsets and meta, and give the folder its name.

        If a share is to be held out and no document is, the one with the least hash is, and those that equal it, unless
        all are equal. Of a single large document, or a large one that is alone, only the last tokens are held out.
        """
        self._close_files()
        lengths = {s: np.fromfile(self.partial / f"{s}.lengths", "<i8") for s in _SPLITS}
        parts = {split: [_map(self.partial / f"{split}.tokens", self.dtype)] for split in lengths}
        if hold_out and len(lengths["train"]) and not len(lengths["held_out"]):
            parts, lengths = _hold_out_one(parts["train"][0], lengths["train"], hold_out, eos_token_id)
        # aside, so that a kill from here on leaves what commit() wrote
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
        # the parts are removed only after the whole file is on the disk
        sync(self.path.parent)
        shutil.rmtree(self.partial)
        self._lock.release()
        return meta

    def _close_files(self) -> None:
        for file in self._files.values():
            file.close()

    def close(self) -> None:
        """Close the open files; what was committed stays for the next writer."""
        self._close_files()
        self._lock.release()

    def discard(self) -> None:
        """Remove all that was written."""
        self._close_files()
        shutil.rmtree(self.partial, ignore_errors=True)
        self._lock.release()
