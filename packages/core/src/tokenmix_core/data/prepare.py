"""Make a token file from a source of text; make and find the built-in corpus."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, cast, get_args

import numpy as np
from filelock import FileLock

from tokenmix_core.data.encode import Encoding, encode_stream, encoding_of
from tokenmix_core.data.sources import BY_FAMILY, STDLIB, ModuleText, Source, open_source, stdlib_source
from tokenmix_core.data.text import BadRow, FileText, LongText, SplitText, parts_of, sha256_of
from tokenmix_core.data.token_file import META, TOKENS, TokenFile, TokenFileMeta
from tokenmix_core.data.token_writer import TokenFileWriter
from tokenmix_core.data.tokenizer import BYTES, load_tokenizer, tokenizer_fingerprint

_COMMIT_SECONDS = 10.0
_SHOWN_BAD_ROWS = 5
_MOST_WORKERS = 1024
BUILT_IN_HELD_OUT = 0.05
# text before the name of a family (a module or package of the standard library) in the hash that decides whether the
# family is held out. It was chosen such that about 4 % of the standard library of Python 3.11 to 3.13 is held out,
# without near-duplicates in the training part
_FAMILIES = "module"
# minimum fraction of families to hold out, so that at least one is held out
_LEAST_SHARE = 0.013

OnBadRow = Literal["stop", "skip"]


def prepare(
    source: str | Source,
    output: str | Path,
    *,
    tokenizer: str = BYTES,
    text_field: str = "text",
    subset: str | None = None,
    split: str = "train",
    held_out: float = 0.001,
    max_tokens: int | None = None,
    on_bad_row: OnBadRow = "stop",
    special_tokens: bool = False,
    workers: int = 1,
    progress: bool = True,
) -> TokenFileMeta:
    """Tokenize the text of a source once and write the tokens to a token file.

    If a call is interrupted or stops at a bad row, another call with the same arguments continues its work. Until the
    file is complete, only `<output>.partial` exists. If `output` is already a complete file made with the same
    arguments, nothing is done.

    Args:
        source: the `spec` of `open_source`, which also gets `text_field`, `subset` and `split`; or a source object.
        output: the folder to make.
        tokenizer: "bytes", or the name of a tokenizer on the hub, or its folder. A document of more than a million
            characters is tokenized in parts, cut between words.
        held_out: fraction of documents to hold out, selected by a hash of their text, so that equal documents are in
            the same split (see `is_held_out` for sources with another rule). If it is not 0, at least one is held out
            if two documents differ, or the end of a large document.
        max_tokens: stop after the document with which the file has at least this many tokens.
        on_bad_row: at a row without text, "stop" and keep the rows before it, or "skip" the row; the file's
            `meta.source["skipped_rows"]` counts skipped rows.
        special_tokens: whether text that spells a special token, such as "<|endoftext|>", becomes that token; then such
            text can end a document.
        workers: number of processes that tokenize, which does not change the file. With more than one, a script must
            call this below `if __name__ == "__main__":`, as multiprocessing always requires.
        progress: whether to show a progress bar.

    Raises:
        ValueError: a wrong argument, a source that cannot be read or has no text, or a bad row at which to stop.
        OSError: the file cannot be written, or a worker process was killed.
    """
    if on_bad_row not in (known := get_args(OnBadRow)):
        raise ValueError(f"on_bad_row must be one of {', '.join(map(repr, known))}, got {on_bad_row!r}")
    if not 0 <= held_out < 1:
        raise ValueError(f"held_out must be a share from 0 to below 1, got {held_out}")
    if max_tokens is not None and max_tokens < 1:
        raise ValueError(f"max_tokens must be at least 1, got {max_tokens}")
    if not 1 <= workers <= _MOST_WORKERS:
        raise ValueError(f"workers must be from 1 to {_MOST_WORKERS}, got {workers}")
    if isinstance(source, str):
        source = open_source(source, text_field=text_field, subset=subset, split=split)
    output = Path(output)
    encoder = load_tokenizer(tokenizer)
    fingerprint = tokenizer_fingerprint(encoder)
    about: dict[str, Any] = {"held_out": held_out, "max_tokens": max_tokens}
    if tokenizer != BYTES:
        about["special_tokens"] = special_tokens
    if (complete := _complete(output, {**source.description, **about}, fingerprint)) is not None:
        return complete
    encoding = encoding_of(tokenizer, encoder, special_tokens=special_tokens)
    output.parent.mkdir(parents=True, exist_ok=True)
    writer = TokenFileWriter(output, {"source": source.description, "tokenizer": fingerprint, **about}, len(encoder))
    run = _Preparation(source, writer, cast(int, encoder.eos_token_id), held_out, max_tokens)
    try:
        run.tokenize(encoding, workers, skip_bad_rows=on_bad_row == "skip", progress=progress)
        if not writer.tokens:
            bad_ones = f" or bad ({run.skipped})" if run.skipped else ""
            raise ValueError(f"the source has no text: {run.consumed} rows read, all of them empty{bad_ones}")
    except ValueError as error:
        if not run.consumed or not writer.tokens:
            writer.discard()
            raise
        writer.commit(run.consumed, run.skipped)
        writer.close()
        skip = "; --on-bad-row skip continues without such rows" if isinstance(error, BadRow) else ""
        raise ValueError(
            f"{error}; {run.consumed:,} rows before it are kept in {writer.partial}{skip}; remove that to begin again"
        ) from error
    except BaseException:
        # keep the rows up to the last commit for the next call
        writer.close()
        raise
    described = {**source.description, **about, "skipped_rows": run.skipped}
    if writer.kinds:
        described["document_kinds"] = dict(sorted(writer.kinds.items()))
    known_by = {"tokenizer": tokenizer, "fingerprint": fingerprint}
    meta = writer.finish(eos_token_id=run.eos, **known_by, source=described, hold_out=held_out)
    if held_out and not meta.held_out_documents:
        few = "is one document" if meta.documents == 1 else f"are {meta.documents:,} equal documents"
        print(f"{output}: nothing is held out, for there {few}; evaluations need another text", file=sys.stderr)
    return meta


def _complete(output: Path, source: dict[str, Any], fingerprint: str) -> TokenFileMeta | None:
    """Return the meta of `output` if it is a complete token file that was made with these arguments, else None."""
    if not (output / META).is_file():
        return None
    try:
        meta = TokenFile(output, "all").meta
    except ValueError:
        return None
    wanted = json.loads(json.dumps(source))
    same = meta.tokenizer_fingerprint == fingerprint and all(meta.source.get(k) == v for k, v in wanted.items())
    return meta if same else None


class _Part(NamedTuple):
    """A part of a document, or a row that has no text.

    Attributes:
        text: the text of the part; empty for a row without text.
        row: for a document's last part, the row; for earlier parts None; the error, if the row or the source cannot be
            read.
        held_out: whether the document is held out.
    """

    text: str
    row: str | LongText | ValueError | None
    held_out: bool = False

    @property
    def ends_batch(self) -> bool:
        """True if the row is an error, at which the preparation may stop."""
        return isinstance(self.row, ValueError)


class _Preparation:
    """Reads the rows of a source, tokenizes them and writes the tokens to a token file.

    Attributes:
        consumed: number of rows so far, written or skipped.
        skipped: number of bad rows so far, which were skipped.
    """

    def __init__(
        self, source: Source, writer: TokenFileWriter, eos: int, held_out: float, max_tokens: int | None
    ) -> None:
        self.source, self.writer, self.eos = source, writer, eos
        self.held_out, self.max_tokens = held_out, max_tokens
        self.consumed, self.skipped = writer.consumed, writer.skipped

    def tokenize(self, encoding: Encoding, workers: int, *, skip_bad_rows: bool, progress: bool) -> None:
        """Write the tokens of rows until the source ends or the file has `max_tokens`; report `progress` if True.

        Raises:
            ValueError: a bad row although `skip_bad_rows` is False, or a source that cannot be read.
        """
        from tqdm import tqdm

        writer = self.writer
        if self._is_enough():
            return
        about = {"total": self.source.total, "initial": self.consumed, "unit": "doc", "disable": not progress}
        committed = time.monotonic()
        with (
            tqdm(desc=f"tokens of {writer.path.name}", **about) as meter,
            closing(encode_stream(self._parts(), encoding, workers)) as parts,
        ):
            for part, tokens in parts:
                row = part.row
                if isinstance(row, ValueError):
                    if not isinstance(row, BadRow) or not skip_bad_rows:
                        raise row
                    self.skipped += 1
                    if self.skipped <= _SHOWN_BAD_ROWS:
                        meter.write(f"skipped: {row}", file=sys.stderr)
                elif part.text:
                    writer.add(tokens, held_out=part.held_out)
                    if row is None:
                        continue
                    writer.add(np.array([self.eos]), held_out=part.held_out)
                    writer.end_document(held_out=part.held_out)
                    if isinstance(row, FileText | LongText):
                        writer.kinds[row.kind] += 1
                self.consumed += 1
                meter.update()
                if self._is_enough():
                    return
                if time.monotonic() - committed > _COMMIT_SECONDS:
                    meter.set_postfix(tokens=f"{writer.tokens:,}", refresh=False)
                    writer.commit(self.consumed, self.skipped)
                    committed = time.monotonic()

    def _is_enough(self) -> bool:
        return self.max_tokens is not None and self.writer.tokens >= self.max_tokens

    def _parts(self) -> Iterator[_Part]:
        """Yield the parts of all rows; if the source cannot be read further, yield the error as the last part."""
        try:
            for row in self.source.rows(self.consumed):
                if isinstance(row, BadRow):
                    yield _Part("", row)
                    continue
                held_out = is_held_out(row, self.held_out)
                before = ""
                for text in parts_of(row):
                    if before:
                        yield _Part(before, None, held_out)
                    before = text
                yield _Part(before, row, held_out)
        except ValueError as error:
            yield _Part("", error)


def files_read(meta: TokenFileMeta) -> str:
    """Return a text on how many files and documents of each kind a token file was made from; empty without files."""
    documents, unread = meta.source.get("document_kinds", {}), meta.source.get("unread_files", {})
    read = [
        f"{count:,} {kind} file{'s' * (count != 1)} ({documents.get(kind, 0):,} documents)"
        for kind, count in meta.source.get("file_kinds", {}).items()
    ]
    left = [f"{count:,} {ending}" for ending, count in unread.items()]
    told = [f"read {', '.join(read)}"] if read else []
    return "; ".join(told + ([f"of a kind that is not read: {', '.join(left)}"] if left else []))


def is_held_out(text: str | LongText, share: float) -> bool:
    """True if a document is held out; about a fraction `share` of all documents is.

    The source may have decided it (`SplitText`). Otherwise a hash decides: for files of the standard library
    (`ModuleText`) a hash of the family, the module or package to which the file belongs; else a hash of the text. The
    fraction of families is at least `_LEAST_SHARE`, unless `share` is 0.
    """
    if isinstance(text, SplitText):
        return text.held_out
    digest = sha256_of(text)
    if isinstance(text, ModuleText):
        digest = sha256_of(f"{_FAMILIES} {text.family}")
        share = max(share, _LEAST_SHARE) if share else 0.0
    return int.from_bytes(digest[:8]) < share * 2**64


def cache_folder() -> Path:
    """Return the folder of built-in corpora: `$TOKENMIX_CACHE`, or `tokenmix` in the user's cache folder."""
    if folder := os.environ.get("TOKENMIX_CACHE"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tokenmix"


class TrainedOn(NamedTuple):
    """The text on which a run was trained; if it is unknown, all fields have their defaults.

    Attributes:
        fingerprints: fingerprint of each source, which begins with the sha256 of the source's tokens.
        sources: names or folders of the sources, as in the recipe.
        tokenizer: name of the tokenizer.
        corpora: Python version and split of the built-in corpus if the run read it; empty in old manifests.
    """

    fingerprints: Mapping[str, str] = MappingProxyType({})
    sources: Sequence[str] = ()
    tokenizer: str = BYTES
    corpora: Sequence[Mapping[str, Any]] = ()


def built_in_corpus(tokenizer: str = BYTES, *, begun_with: str | None = None) -> Path:
    """Return the folder of the built-in corpus as a token file; the first call makes the file.

    If several processes call this at the same time, one makes the file and the others wait. An existing file is only
    read.

    Args:
        tokenizer: name of the tokenizer.
        begun_with: fingerprint of the text of a run, which begins with the sha256 of the run's tokens. If these are the
            tokens of the older split, by each file's text instead of by module family, the corpus with that split is
            returned, and a sentence on stderr says so.

    Raises:
        ValueError: the file is damaged, or it does not exist and its folder cannot be written.
    """
    path = _built_in_corpus(tokenizer, stdlib_source())
    if begun_with is not None and not begun_with.startswith(tokens_sha256(path)):
        older = _built_in_corpus(tokenizer, stdlib_source(by_family=False))
        if begun_with.startswith(tokens_sha256(older)):
            print(
                f"the run began with an older split of the built-in corpus, by text, and keeps it ({older}): some "
                "held-out documents are near-duplicates of training documents",
                file=sys.stderr,
            )
            return older
    return path


def tokens_sha256(path: Path) -> str:
    """Return the sha256 of the tokens from a token file's meta, which identifies corpus, tokenizer and split."""
    return TokenFile(path, verify=False).meta.sha256[TOKENS]


def _built_in_corpus(tokenizer: str, source: Source) -> Path:
    fingerprint = tokenizer_fingerprint(load_tokenizer(tokenizer))
    # files with the older split, by text, have names without this third part
    split = "-by-family" if source.description.get("split") == BY_FAMILY else ""
    path = cache_folder() / f"{STDLIB}-{source.description['sha256'][:12]}-{fingerprint[:12]}{split}"
    try:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(str(path) + ".lock"):
                if not path.exists():
                    prepare(source, path, tokenizer=tokenizer, held_out=BUILT_IN_HELD_OUT)
    except OSError as error:
        raise ValueError(
            f"the built-in corpus cannot be kept in {path.parent} ({error.strerror or error}); set TOKENMIX_CACHE to a "
            "writable folder"
        ) from error
    try:
        TokenFile(path, fingerprint=fingerprint)
    except ValueError as error:
        raise ValueError(f"{error}; remove {path} to have it made again") from error
    return path
