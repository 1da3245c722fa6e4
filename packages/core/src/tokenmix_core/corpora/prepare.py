"""Turn a source of text into a token file, and keep the built-in corpus ready."""

from __future__ import annotations

import hashlib
import itertools
import os
import time
from pathlib import Path
from typing import Any

from filelock import FileLock

from tokenmix_core.corpora.sources import STDLIB, Source, open_source, stdlib_source
from tokenmix_core.corpora.token_file import TokenFile, TokenFileMeta, TokenFileWriter
from tokenmix_core.corpora.tokenizer import BYTES, load_tokenizer, tokenizer_fingerprint

_BATCH_DOCUMENTS = 256
_COMMIT_SECONDS = 10.0
BUILT_IN_HELD_OUT = 0.05


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
    progress: bool = True,
) -> TokenFileMeta:
    """Tokenize a corpus once, into a token file.

    A run that was stopped at any moment goes on where it was when it is called again with the same arguments; until the
    file is complete there is nothing at `output`, only `<output>.partial`.

    Args:
        source: what `open_source` takes, with `text_field`, `subset` and `split`, or a source.
        output: the folder to make.
        tokenizer: "bytes", or a tokenizer of the hub or of a folder.
        held_out: the share of documents to hold out, chosen by a hash of their text, so that equal documents stay
            together.
        max_tokens: stop at the first document that reaches so many.
        progress: show a progress bar.

    Raises:
        ValueError: a bad argument, an unreadable source, or a source without any text.
    """
    from tqdm import tqdm

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
    consumed = writer.consumed
    documents = source.documents(consumed)
    bar = tqdm(total=source.total, initial=consumed, unit="doc", desc=f"tokens of {output.name}", disable=not progress)
    committed = time.monotonic()
    try:
        with bar:
            while texts := list(itertools.islice(documents, _BATCH_DOCUMENTS)):
                if max_tokens is not None and writer.tokens >= max_tokens:
                    break
                kept = [text for text in texts if text]
                encoded = encoder(kept, add_special_tokens=False, verbose=False)["input_ids"] if kept else []
                ended = [[*ids, eos] for ids in encoded]
                if max_tokens is not None:
                    sizes = itertools.accumulate(map(len, ended), initial=writer.tokens)
                    ended = ended[: sum(1 for size in itertools.islice(sizes, len(ended)) if size < max_tokens)]
                writer.append(ended, [is_held_out(text, held_out) for text in kept[: len(ended)]])
                consumed += len(texts)
                bar.update(len(texts))
                bar.set_postfix(tokens=f"{writer.tokens:,}", refresh=False)
                if time.monotonic() - committed > _COMMIT_SECONDS:
                    writer.commit(consumed)
                    committed = time.monotonic()
        if not writer.tokens:
            raise ValueError(f"the source has no text: {consumed} documents read, all of them empty")
    except ValueError:
        # bad input does not get better by going on
        writer.discard()
        raise
    except BaseException:
        # what the last commit covers stays, for the next call
        writer.close()
        raise
    recorded = {**source.description, "held_out": held_out, "max_tokens": max_tokens}
    return writer.finish(eos_token_id=eos, tokenizer=tokenizer, fingerprint=fingerprint, source=recorded)


def is_held_out(text: str, share: float) -> bool:
    """Whether a document belongs to the held-out split: decided by its text alone."""
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "replace")).digest()[:8]) < share * 2**64


def cache_folder() -> Path:
    """Where built-in corpora are kept: `$TOKENMIX_CACHE`, else `tokenmix` in the user's cache folder."""
    if folder := os.environ.get("TOKENMIX_CACHE"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tokenmix"


def built_in_corpus(tokenizer: str = BYTES) -> Path:
    """The folder of the built-in corpus as a token file; it is made at the first call.

    Processes that ask at the same time wait for the one that makes it. One that is there is only read.

    Raises:
        ValueError: it is damaged, or there is none and the folder for it cannot be written.
    """
    source = stdlib_source()
    fingerprint = tokenizer_fingerprint(load_tokenizer(tokenizer))
    path = cache_folder() / f"{STDLIB}-{source.description['sha256'][:12]}-{fingerprint[:12]}"
    try:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(str(path) + ".lock"):
                if not path.exists():
                    prepare(source, path, tokenizer=tokenizer, held_out=BUILT_IN_HELD_OUT)
    except OSError as error:
        raise ValueError(
            f"the built-in corpus cannot be kept in {path.parent} ({error.strerror or error}); set TOKENMIX_CACHE to a "
            "folder that can be written"
        ) from error
    try:
        TokenFile(path, fingerprint=fingerprint)
    except ValueError as error:
        raise ValueError(f"{error}; remove {path} to have it made again") from error
    return path
