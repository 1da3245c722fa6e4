"""The text on which suites run, as documents, words or tokens."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

from tokenmix_core.data.prepare import BUILT_IN_HELD_OUT, TrainedOn, built_in_corpus, is_held_out, tokens_sha256
from tokenmix_core.data.sources import BY_FAMILY, STDLIB, open_source, stdlib_source
from tokenmix_core.data.synthetic import NIAH_TASKS
from tokenmix_core.data.token_file import META, TOKENS, TokenFile, file_sha256
from tokenmix_core.data.tokenizer import byte_tokenizer, encode_texts, tokenizer_fingerprint
from tokenmix_core.evaluation.options import EvalOptions

BUILT_IN_TEXT = "built-in corpus, held-out part"


def text_vocab_size(model: Any) -> int:
    """Return the size of a causal language model's output per token, its number of logits."""
    return model.get_output_embeddings().weight.shape[0]


def document_separator(tokenizer: Any) -> int | None:
    """Return the token to put before a text that has no context: bos if the tokenizer adds it to texts, else eos.

    Our corpora, like most, contain no bos; in them, eos ends every document.
    """
    first = tokenizer("a")["input_ids"][:1]
    return tokenizer.bos_token_id if first == [tokenizer.bos_token_id] else tokenizer.eos_token_id


def as_token_file(text: str | None, tokenizer: Any) -> Path | None:
    """Return the folder of a text that is a token file or, for the byte tokenizer, the built-in corpus; else None."""
    if text is not None and (Path(text) / META).is_file():
        return Path(text)
    if text in (None, STDLIB) and tokenizer_fingerprint(tokenizer) == tokenizer_fingerprint(byte_tokenizer()):
        return built_in_corpus()
    return None


def corpus_of(text: str | None, tokenizer: Any) -> dict[str, Any]:
    """Return the identity of a text for results: name, sha256 and, for the built-in corpus, the version of Python.

    The sha256 is taken of a token file's tokens, of the built-in corpus's files, or of a file; it is None for other
    texts.
    """
    found: dict[str, Any] = {"text": text or BUILT_IN_TEXT, "sha256": None}
    if path := as_token_file(text, tokenizer):
        meta = TokenFile(path, verify=False).meta
        return found | {"sha256": meta.sha256[TOKENS]} | _python_of(meta.source)
    if text is None or text == STDLIB:
        description = stdlib_source().description
        return found | {"sha256": description["sha256"]} | _python_of(description)
    return found | {"sha256": file_sha256(text)} if Path(text).is_file() else found


def _python_of(source: Mapping[str, Any]) -> dict[str, Any]:
    return {key: source[key] for key in ("python", "split") if key in source}


def held_out_from(options: EvalOptions, trained: TrainedOn) -> EvalOptions:
    """Return options whose text was not part of a run's training text, as far as the run's manifest tells.

    Warn on stderr if a corpus that the run used has changed since then.

    If the run used an older split of the built-in corpus, that split's held-out text replaces the options' text.

    Raises:
        ValueError: most of the held-out text was part of the run's training text.
    """
    if options.text is not None and options.text != STDLIB:
        _check_unchanged(Path(options.text), trained)
        return options
    haystacks = [task for task, about in NIAH_TASKS.items() if about.haystack == "text"]
    known = next((trained.fingerprints[s] for s in (STDLIB, *haystacks) if s in trained.fingerprints), None)
    if known is None:
        return options
    path = built_in_corpus(trained.tokenizer, begun_with=known)
    source = TokenFile(path, verify=False).meta.source
    if known.startswith(tokens_sha256(path)):
        return options if source.get("split") == BY_FAMILY else replace(options, text=str(path))
    before = next((corpus for corpus in trained.corpora if corpus.get("split") == BY_FAMILY), None)
    if before is None:
        raise ValueError(
            "the model was trained on the built-in corpus of another Python version, split by text: most of the text "
            f"that Python {source['python']} holds out was training text then; evaluate with that Python version, or "
            "on another text (--text)"
        )
    print(
        f"the model was trained on the built-in corpus of Python {before.get('python')}, and is evaluated on that of "
        f"Python {source['python']}: the same modules are held out, but their text, and so the results, differ",
        file=sys.stderr,
    )
    return options


def _check_unchanged(path: Path, trained: TrainedOn) -> None:
    """Warn on stderr if the token file at `path` has changed since the run was trained on it."""
    if not (path / META).is_file() or path.name not in {Path(source).name for source in trained.sources}:
        return
    sha256 = tokens_sha256(path)
    if not any(known.startswith(sha256) for known in trained.fingerprints.values()):
        print(
            f"{path} has changed since the model was trained on it: its held-out documents may have been training "
            "documents",
            file=sys.stderr,
        )


def documents(text: str | None, tokenizer: Any) -> Iterator[str]:
    """Yield the documents of a text.

    Args:
        text: a token file (its held-out documents are decoded); a text, JSONL or parquet file, or a folder of them; a
            dataset; or None or "stdlib" for the held-out part of the built-in corpus.
        tokenizer: the tokenizer with which a token file must have been made.

    Raises:
        ValueError: the text does not exist or cannot be read.
    """
    if text in (None, STDLIB):
        return (d for d in stdlib_source().documents(0) if is_held_out(d, BUILT_IN_HELD_OUT))
    if path := as_token_file(text, tokenizer):
        file = TokenFile(path, "held_out", fingerprint=tokenizer_fingerprint(tokenizer))
        ids = (file.document(i) for i in range(file.num_documents))
        return (tokenizer.decode(document, skip_special_tokens=True) for document in ids)
    return open_source(text).documents(0)


def words(text: str | None, tokenizer: Any, count: int) -> list[str]:
    """Return the first `count` words of a text, or all words if it has fewer."""
    stream = (word for document in documents(text, tokenizer) for word in document.split())
    return list(itertools.islice(stream, count))


def text_tokens(text: str | None, tokenizer: Any, count: int) -> Int[np.ndarray, "n"]:
    """Return the first `count` tokens of a text (of a token file: of its held-out part), or all if it has fewer.

    Each document ends with the end token, if the tokenizer has one.

    Raises:
        ValueError: the text does not exist, was prepared with another tokenizer, or is empty.
    """
    if path := as_token_file(text, tokenizer):
        return np.asarray(TokenFile(path, "held_out", fingerprint=tokenizer_fingerprint(tokenizer)).tokens[:count])
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    parts: list[np.ndarray] = []
    missing = count
    for document in documents(text, tokenizer):
        if missing <= 0:
            break
        # tokenize only 16 characters of a document per token that is still needed, since few tokens are longer
        ids = encode_texts(tokenizer, [document[: 16 * missing + 16]])[0]
        parts.append(np.asarray([*ids, *end], dtype=np.int64)[:missing])
        missing -= len(parts[-1])
    if not parts:
        raise ValueError(f"the text {text!r} holds no document")
    return np.concatenate(parts)


def training_tokens(text: str | None, tokenizer: Any) -> Int[np.ndarray, "n"] | None:
    """Return the tokens of a text's training part; None if the text is not divided into training and held-out part."""
    path = as_token_file(text, tokenizer)
    return TokenFile(path, "train", fingerprint=tokenizer_fingerprint(tokenizer)).tokens if path else None


def bytes_per_token(sequences: Int[np.ndarray, "N T"], tokenizer: Any) -> float:
    """Return the number of UTF-8 bytes of text per token.

    Special tokens count 0 bytes; a token that is a part of a character counts its own bytes.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if isinstance(getattr(backend, "decoder", None), _byte_level()):
        # in byte-level BPE, each character of a token's name stands for one byte of text; only the name of an added
        # token is the text itself
        added = {i: len(text.encode()) for text, i in tokenizer.get_added_vocab().items()}
        added |= dict.fromkeys(tokenizer.all_special_ids, 0)
        ids, counts = np.unique(sequences, return_counts=True)
        names = tokenizer.convert_ids_to_tokens(ids.tolist())
        sizes = [added.get(i, len(name or "")) for i, name in zip(ids.tolist(), names, strict=True)]
        return float(np.dot(sizes, counts)) / sequences.size
    rows = tokenizer.batch_decode(sequences, skip_special_tokens=True)
    return sum(_row_bytes(row) for row in rows) / sequences.size


def _byte_level() -> type:
    from tokenizers.decoders import ByteLevel

    return ByteLevel


def _row_bytes(text: str) -> int:
    """Return the UTF-8 bytes of a decoded row; U+FFFD at its ends counts as one byte of a character that was cut."""
    whole = text.strip("\ufffd")
    return len(whole.encode("utf-8", "replace")) + len(text) - len(whole)
