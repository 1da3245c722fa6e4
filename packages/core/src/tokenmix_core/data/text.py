"""Documents of a corpus: the kind of file they come from, their split, and the reading of long documents in parts."""

from __future__ import annotations

import codecs
import hashlib
from collections.abc import Iterator
from pathlib import Path

# maximum number of characters in a part; number of characters before this maximum in which a boundary is searched
PART_CHARS, LOOK_BACK = 2**20, 2**16
_BLOCK_BYTES = 2**20


class BadRow(ValueError):
    """A row or file from which no text can be read; the message names it and the reason. Sources yield it as a row."""


class FileText(str):
    """A document that was read from a file.

    Attributes:
        kind: the kind of the file: "JSONL", "parquet" or "text".
    """

    kind: str

    def __new__(cls, text: str, kind: str) -> FileText:
        self = super().__new__(cls, text)
        self.kind = kind
        return self


class SplitText(str):
    """A document whose split has been decided by its source.

    Attributes:
        held_out: whether the document is held out.
    """

    held_out: bool

    def __new__(cls, text: str, *, held_out: bool) -> SplitText:
        self = super().__new__(cls, text)
        self.held_out = held_out
        return self


class LongText:
    """A text file that is read in parts, because it may exceed the memory; `str` returns all its text.

    Args:
        path: the file.
        kind: the kind of the file.

    Attributes:
        digest: the sha256 of the file's bytes.

    Raises:
        BadRow: the file is not UTF-8.
    """

    def __init__(self, path: Path, kind: str) -> None:
        self.path, self.kind = path, kind
        digest = hashlib.sha256()
        for _ in self._decoded(digest):
            pass
        self.digest = digest.digest()

    def _decoded(self, digest: hashlib._Hash | None = None) -> Iterator[str]:
        decoder = codecs.getincrementaldecoder("utf-8")()
        first = 0
        # open as bytes: reading as text would turn \r\n into \n
        with open(self.path, "rb") as file:
            while True:
                block = file.read(_BLOCK_BYTES)
                pending = len(decoder.getstate()[0])
                try:
                    text = decoder.decode(block, final=not block)
                except UnicodeDecodeError as error:
                    raise not_utf8(self.path, first - pending + error.start) from error
                if digest is not None:
                    digest.update(block)
                if text:
                    yield text
                if not block:
                    return
                first += len(block)

    def parts(self) -> Iterator[str]:
        """Yield the text in parts."""
        waiting = ""
        for text in self._decoded():
            waiting += text
            # more than one part is needed: the character after a part shows whether a space ends its last word
            while len(waiting) > PART_CHARS:
                end = part_end(waiting, 0)
                yield waiting[:end]
                waiting = waiting[end:]
        if waiting:
            yield waiting

    def __str__(self) -> str:
        return "".join(self._decoded())


def not_utf8(path: Path, position: int) -> BadRow:
    """Return the error for a file that is not UTF-8 text."""
    return BadRow(f"{path} is not UTF-8 text: byte {position} cannot be decoded")


def part_end(text: str, start: int) -> int:
    """Return the index at which the part of `text` that begins at `start` should end.

    If more than `PART_CHARS` characters are left, the end is searched in the last `LOOK_BACK` of the first
    `PART_CHARS`. The part ends before a single space between two words, if there is one: tokenizers also split there,
    so that the parts have the same tokens as the whole text. Otherwise it ends after a line break between two words
    or, if there is none, after `PART_CHARS` characters.
    """
    end = start + PART_CHARS
    if end >= len(text):
        return len(text)
    for mark, after in ((" ", 0), ("\n", 1)):
        at = end + 1
        while (at := text.rfind(mark, end - LOOK_BACK, at)) > start:
            if not text[at - 1].isspace() and not text[at + 1 : at + 2].isspace() and at + after <= end:
                return at + after
    return end


def parts_of(text: str | LongText) -> Iterator[str]:
    """Yield the parts of a document, each of at most `PART_CHARS` characters; nothing for an empty document."""
    if isinstance(text, LongText):
        yield from text.parts()
        return
    start = 0
    while start < len(text):
        end = part_end(text, start)
        yield text[start:end]
        start = end


def sha256_of(text: str | LongText) -> bytes:
    """Return the sha256 of a document's text in UTF-8."""
    if isinstance(text, LongText):
        return text.digest
    digest = hashlib.sha256()
    for start in range(0, len(text), PART_CHARS):
        digest.update(text[start : start + PART_CHARS].encode("utf-8", "replace"))
    return digest.digest()
