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
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout

from tokenmix_core.files import write_atomically

FORMAT = "tokenmix-tokens-1"
TOKENS, DOCUMENTS, META = "tokens.bin", "documents.npy", "meta.json"
_STAMP = ".verified"


@dataclass(frozen=True)
class TokenFileMeta:
    """What `meta.json` holds; the held-out documents are the last ones of the file."""

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
        tokens = np.memmap(self.path / TOKENS, dtype, mode="r") if self.meta.tokens else np.zeros(0, dtype)
        try:
            documents = np.load(self.path / DOCUMENTS, mmap_mode="r")
        except (OSError, ValueError) as error:
            raise ValueError(f"{self.path / DOCUMENTS} cannot be read: {error}") from error
        if documents.shape != (self.meta.documents + 1,) or documents[-1] != self.meta.tokens:
            raise ValueError(
                f"{self.path / DOCUMENTS} does not belong to its {META}: expected {self.meta.documents} documents and "
                f"{self.meta.tokens} tokens, got {len(documents) - 1} and {documents[-1]}"
            )
        border = self.meta.documents - self.meta.held_out_documents
        first, last = {"train": (0, border), "held_out": (border, None), "all": (0, None)}[split]
        kept = documents[first : None if last is None else last + 1]
        self.documents = np.asarray(kept) - kept[0]
        self.tokens = tokens[kept[0] : kept[-1]]

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def num_documents(self) -> int:
        """Documents of the split."""
        return len(self.documents) - 1

    def document(self, index: int) -> np.ndarray:
        """The tokens of one document, its end token included."""
        return self.tokens[self.documents[index] : self.documents[index + 1]]

    def borders(self, start: int, stop: int) -> np.ndarray:
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
        content = json.loads((path / META).read_text())
    except ValueError as error:
        raise ValueError(f"{path / META} is not valid JSON: {error}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        got = content.get("format") if isinstance(content, dict) else type(content).__name__
        raise ValueError(f"{path / META} must have format {FORMAT!r}, got {got!r}")
    try:
        return TokenFileMeta(**content)
    except TypeError as error:
        raise ValueError(f"{path / META} does not hold what a token file's must: {error}") from error


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


class TokenFileWriter:
    """Writes a token file into `<path>.partial`, which becomes `path` in one rename when all of it is there.

    `commit` makes what was appended so far durable; a writer opened again with the same settings goes on after the
    last commit, and says in `consumed` how many documents of the source that covers.

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
        self.dtype = np.dtype("<u2" if vocab_size <= 2**16 else "<u4")
        self.consumed = 0
        if self.path.exists():
            raise ValueError(f"{self.path} exists already; choose another folder or remove it")
        self.partial.mkdir(parents=True, exist_ok=True)
        self._lock = FileLock(self.partial / "lock", blocking=False)
        try:
            self._lock.acquire()
        except Timeout:
            raise ValueError(f"{self.partial} is being written by another process") from None
        try:
            sizes = self._read_progress()
        except BaseException:
            self._lock.release()
            raise
        self._files = {name: open(self.partial / name, "ab") for name in self._PARTS}  # noqa: SIM115
        for name, size in sizes.items():
            self._files[name].truncate(size)
        self.tokens = (sizes["train.tokens"] + sizes["held_out.tokens"]) // self.dtype.itemsize

    def _read_progress(self) -> dict[str, int]:
        try:
            progress = json.loads((self.partial / "progress.json").read_text())
        except FileNotFoundError:
            return dict.fromkeys(self._PARTS, 0)
        if progress["settings"] != self.settings:
            old, new = progress["settings"], self.settings
            changed = sorted(k for k in {*old, *new} if old.get(k) != new.get(k))
            told = "; ".join(f"{k} was {old.get(k)!r} and is {new.get(k)!r}" for k in changed)
            raise ValueError(f"{self.partial} was begun with other settings ({told}); remove it to begin anew")
        self.consumed = progress["consumed"]
        return progress["sizes"]

    def append(self, documents: Sequence[Sequence[int]], held_out: Sequence[bool]) -> None:
        """Append documents, each with its end token; `held_out` says which split each one goes to."""
        for split, wanted in (("train", False), ("held_out", True)):
            chosen = [np.asarray(d, self.dtype) for d, h in zip(documents, held_out, strict=True) if h == wanted]
            if chosen:
                self._files[f"{split}.tokens"].write(np.concatenate(chosen).tobytes())
                self._files[f"{split}.lengths"].write(np.array([len(d) for d in chosen], "<i8").tobytes())
                self.tokens += sum(map(len, chosen))

    def commit(self, consumed: int) -> None:
        """Make all that was appended durable, as the outcome of the first `consumed` documents of the source."""
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        self.consumed = consumed
        sizes = {name: file.tell() for name, file in self._files.items()}
        progress = {"settings": self.settings, "consumed": consumed, "sizes": sizes}
        write_atomically(self.partial / "progress.json", json.dumps(progress))

    def finish(
        self, *, eos_token_id: int, tokenizer: str, fingerprint: str, source: Mapping[str, Any]
    ) -> TokenFileMeta:
        """Join the two splits, write offsets and meta, and give the folder its name."""
        self.close()
        lengths = {s: np.fromfile(self.partial / f"{s}.lengths", "<i8") for s in ("train", "held_out")}
        # a new file, so that a kill from here on leaves what commit() recorded
        with open(self.partial / TOKENS, "wb") as whole:
            for split in ("train", "held_out"):
                with open(self.partial / f"{split}.tokens", "rb") as part:
                    shutil.copyfileobj(part, whole, 1 << 24)
            whole.flush()
            os.fsync(whole.fileno())
        offsets = np.concatenate([[0], np.cumsum(np.concatenate([lengths["train"], lengths["held_out"]]))])
        np.save(self.partial / DOCUMENTS, offsets.astype(np.int64))
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
            sha256={name: file_sha256(self.partial / name) for name in (TOKENS, DOCUMENTS)},
        )
        write_atomically(self.partial / META, json.dumps(asdict(meta), indent=2) + "\n")
        for name in (*self._PARTS, "progress.json", "lock"):
            (self.partial / name).unlink(missing_ok=True)
        os.rename(self.partial, self.path)
        return meta

    def close(self) -> None:
        """Close the open files; what was committed stays for the next writer."""
        for file in self._files.values():
            file.close()
        self._lock.release()

    def discard(self) -> None:
        """Remove all that was written."""
        self.close()
        shutil.rmtree(self.partial, ignore_errors=True)
