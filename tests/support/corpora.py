"""Make small corpora from text files, as a user would."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tokenmix_core.data.prepare import prepare


def token_file(folder: Path, documents: Iterable[str], *, held_out: float = 0.1) -> Path:
    """Write each document to a file below `folder`, tokenise them by bytes, and return the folder of the token file."""
    texts = folder / "texts"
    texts.mkdir()
    for i, text in enumerate(documents):
        (texts / f"{i:02}.txt").write_text(text)
    prepare(str(texts), folder / "tokens", held_out=held_out, progress=False)
    return folder / "tokens"


def documents(number: int) -> Iterable[str]:
    """Return this number of documents of 60 words; each begins with another word than the 22 before it."""
    return (" ".join(f"word{(i * 7 + j) % 23}" for j in range(60)) for i in range(number))
