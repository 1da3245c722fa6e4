"""Turn a source of text into a token file, and keep the built-in corpus ready."""

from __future__ import annotations

import hashlib
import itertools
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, get_args

from filelock import FileLock

from tokenmix_core.data.sources import (
    BY_FAMILY,
    STDLIB,
    BadRow,
    FileText,
    ModuleText,
    Source,
    open_source,
    stdlib_source,
)
from tokenmix_core.data.token_file import TOKENS, TokenFile, TokenFileMeta, TokenFileWriter
from tokenmix_core.data.tokenizer import BYTES, load_tokenizer, tokenizer_fingerprint

_BATCH_DOCUMENTS = 256
_COMMIT_SECONDS = 10.0
_SHOWN_BAD_ROWS = 5
BUILT_IN_HELD_OUT = 0.05
# a prefix under which the families held out are about 4 % of the text of Python 3.11 to 3.13 and resemble no others
_FAMILIES = "module"
# so that any share holds out one family
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
    progress: bool = True,
) -> TokenFileMeta:
    """Tokenize a corpus once, into a token file.

    A run that was stopped at any moment, by a bad row too, goes on where it was when it is called again with the same
    arguments; until the file is complete there is nothing at `output`, only `<output>.partial`.

    Args:
        source: what `open_source` takes, with `text_field`, `subset` and `split`, or a source.
        output: the folder to make.
        tokenizer: "bytes", or a tokenizer of the hub or of a folder.
        held_out: the share of documents to hold out, chosen by a hash of their text, so that equal documents stay
            together. Any share but 0 holds out one at least, where two documents differ.
        max_tokens: stop at the first document that reaches so many.
        on_bad_row: "stop" at a row that holds no text and keep what came before it, or "skip" it; those skipped are
            counted in the file's `meta.source["skipped_rows"]`.
        progress: show a progress bar.

    Raises:
        ValueError: a bad argument, an unreadable source, a bad row to stop at, or a source without any text.
    """
    from tqdm import tqdm

    if on_bad_row not in (known := get_args(OnBadRow)):
        raise ValueError(f"on_bad_row must be one of {', '.join(map(repr, known))}, got {on_bad_row!r}")
    if not 0 <= held_out < 1:
        raise ValueError(f"held_out must be a share from 0 to below 1, got {held_out}")
    if max_tokens is not None and max_tokens < 1:
        raise ValueError(f"max_tokens must be at least 1, got {max_tokens}")
    if isinstance(source, str):
        source = open_source(source, text_field=text_field, subset=subset, split=split)
    output = Path(output)
    encoder = load_tokenizer(tokenizer)
    fingerprint = tokenizer_fingerprint(encoder)
    settings: dict[str, Any] = {"source": source.description, "tokenizer": fingerprint}
    settings |= {"held_out": held_out, "max_tokens": max_tokens}
    output.parent.mkdir(parents=True, exist_ok=True)
    eos: Any = encoder.eos_token_id
    writer = TokenFileWriter(output, settings, len(encoder))
    consumed, skipped, kinds = writer.consumed, writer.skipped, writer.kinds
    bar = tqdm(total=source.total, initial=consumed, unit="doc", desc=f"tokens of {output.name}", disable=not progress)
    committed = time.monotonic()
    try:
        with bar:
            rows = source.rows(consumed)
            while (max_tokens is None or writer.tokens < max_tokens) and (
                batch := list(itertools.islice(rows, _BATCH_DOCUMENTS))
            ):
                bad = next((row for row in batch if isinstance(row, BadRow)), None) if on_bad_row == "stop" else None
                batch = batch if bad is None else batch[: batch.index(bad)]
                texts = {place: row for place, row in enumerate(batch) if row and not isinstance(row, BadRow)}
                kept = list(texts.values())
                encoded = encoder(kept, add_special_tokens=False, verbose=False)["input_ids"] if kept else []
                ended = [[*ids, eos] for ids in encoded]
                if max_tokens is not None:
                    sizes = itertools.accumulate(map(len, ended), initial=writer.tokens)
                    ended = ended[: sum(1 for size in itertools.islice(sizes, len(ended)) if size < max_tokens)]
                    if writer.tokens + sum(map(len, ended)) >= max_tokens:
                        # what comes after the last one is not asked for
                        batch, bad = batch[: list(texts)[len(ended) - 1] + 1], None
                writer.append(ended, [is_held_out(text, held_out) for text in kept[: len(ended)]])
                kinds.update(text.kind for text in kept[: len(ended)] if isinstance(text, FileText))
                consumed += len(batch)
                if bad is not None:
                    raise bad
                for row in (row for row in batch if isinstance(row, BadRow)):
                    skipped += 1
                    if skipped <= _SHOWN_BAD_ROWS:
                        bar.write(f"skipped: {row}", file=sys.stderr)
                bar.update(len(batch))
                bar.set_postfix(tokens=f"{writer.tokens:,}", refresh=False)
                if time.monotonic() - committed > _COMMIT_SECONDS:
                    writer.commit(consumed, skipped)
                    committed = time.monotonic()
    except ValueError as error:
        if not consumed:
            writer.discard()
            raise
        writer.commit(consumed, skipped)
        writer.close()
        skip = "; --on-bad-row skip goes on from there without such rows" if isinstance(error, BadRow) else ""
        raise ValueError(
            f"{error}; {consumed:,} rows before it are kept in {writer.partial}{skip}; remove that to begin anew"
        ) from error
    except BaseException:
        # what the last commit covers stays, for the next call
        writer.close()
        raise
    if not writer.tokens:
        writer.discard()
        bad_ones = f" or bad ({skipped})" if skipped else ""
        raise ValueError(f"the source has no text: {consumed} rows read, all of them empty{bad_ones}")
    recorded = {**source.description, "held_out": held_out, "max_tokens": max_tokens, "skipped_rows": skipped}
    if kinds:
        recorded["document_kinds"] = dict(sorted(kinds.items()))
    known_by = {"tokenizer": tokenizer, "fingerprint": fingerprint}
    meta = writer.finish(eos_token_id=eos, **known_by, source=recorded, hold_out_one=held_out > 0)
    if held_out and not meta.held_out_documents:
        few = "is one document" if meta.documents == 1 else f"are {meta.documents:,} equal documents"
        print(f"{output}: nothing is held out, for there {few}; evaluations need another text", file=sys.stderr)
    return meta


def files_read(meta: TokenFileMeta) -> str:
    """Say how many files and documents of each kind a token file was made from; empty if it is of no files."""
    documents, unread = meta.source.get("document_kinds", {}), meta.source.get("unread_files", {})
    read = [
        f"{count:,} {kind} file{'s' * (count != 1)} ({documents.get(kind, 0):,} documents)"
        for kind, count in meta.source.get("file_kinds", {}).items()
    ]
    left = [f"{count:,} {ending}" for ending, count in unread.items()]
    told = [f"read {', '.join(read)}"] if read else []
    return "; ".join(told + ([f"of a kind that is not read: {', '.join(left)}"] if left else []))


def is_held_out(text: str, share: float) -> bool:
    """Tell whether a document belongs to the held-out split: by its text, or by its family in the standard library."""
    key = text
    if isinstance(text, ModuleText):
        key = f"{_FAMILIES} {text.family}"
        share = max(share, _LEAST_SHARE) if share else 0.0
    return int.from_bytes(hashlib.sha256(key.encode("utf-8", "replace")).digest()[:8]) < share * 2**64


def cache_folder() -> Path:
    """Where built-in corpora are kept: `$TOKENMIX_CACHE`, else `tokenmix` in the user's cache folder."""
    if folder := os.environ.get("TOKENMIX_CACHE"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tokenmix"


class TrainedOn(NamedTuple):
    """The text of a training run; empty if it is not known.

    Attributes:
        fingerprints: by source; that of a text begins with the sha256 of its tokens.
        sources: names and folders, as the recipe lists them.
        tokenizer: name of the tokenizer.
        corpora: Python version and split of the built-in corpus, if the run read it; empty in old records.
    """

    fingerprints: Mapping[str, str] = MappingProxyType({})
    sources: Sequence[str] = ()
    tokenizer: str = BYTES
    corpora: Sequence[Mapping[str, Any]] = ()


def built_in_corpus(tokenizer: str = BYTES, *, begun_with: str | None = None) -> Path:
    """Return the folder of the built-in corpus as a token file; it is made at the first call.

    Concurrent processes wait for the one that makes it. An existing corpus is only read.

    Args:
        tokenizer: name of the tokenizer.
        begun_with: fingerprint of a run's text, which begins with the sha256 of its tokens. If it is the fingerprint of
            the split by text, which was used before the split by module family, that corpus is returned, with a
            sentence on stderr.

    Raises:
        ValueError: the corpus is damaged, or it does not exist and its folder cannot be written.
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
    """Return the recorded sha256 of a token file's tokens, which identifies corpus, tokenizer and split."""
    return TokenFile(path, verify=False).meta.sha256[TOKENS]


def _built_in_corpus(tokenizer: str, source: Source) -> Path:
    fingerprint = tokenizer_fingerprint(load_tokenizer(tokenizer))
    # the split by text has had the name without the third part
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
