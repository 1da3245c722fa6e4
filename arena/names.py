"""Names that first occur in held-out code in their definition and are used later; `cloze.py` asks for them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from arena.packages import Document

NAMES = "names.json"
# a definition in C, Python or Rust at the start of a line
_DEFINITION = re.compile(
    r"^(?:#[ \t]*define[ \t]+|(?:static|struct|union|enum|inline|const|unsigned|void|int|bool|u\d+|s\d+|long|typedef|"
    r"def|class|fn|pub|extern|ssize_t|size_t)\b[^;()=\n]*?[ *])([A-Za-z_]\w{11,})\b",
    re.MULTILINE,
)
_WORD = re.compile(r"\b[A-Za-z_]\w{11,}\b")
# maximum number of names from one document, spread over it: no document should dominate
_MOST_OF_A_DOCUMENT = 8


class Name(NamedTuple):
    """A name in a held-out document.

    Attributes:
        document: index of the document in the held-out split.
        defined, used: character positions at which the first and the second occurrence of the name begin.
        name: the name.
    """

    document: int
    defined: int
    used: int
    name: str


def find_names(held_out: Sequence[str], training: Iterable[Document]) -> list[Name]:
    """Return held-out names that first occur in their definition, are used later, and occur in no training text.

    A document has at most `_MOST_OF_A_DOCUMENT` of them.
    """
    found = [name for index, text in enumerate(held_out) for name in _names_of(index, text)]
    left = {name.name for name in found}
    for document in training:
        left.difference_update(_WORD.findall(document.text))
    chosen: list[Name] = []
    for _, group in itertools.groupby((name for name in found if name.name in left), lambda name: name.document):
        names = list(group)
        count = min(len(names), _MOST_OF_A_DOCUMENT)
        chosen += [names[i * len(names) // count] for i in range(count)]
    return chosen


def _names_of(index: int, text: str) -> list[Name]:
    positions: dict[str, list[int]] = {}
    for match in _WORD.finditer(text):
        positions.setdefault(match[0], []).append(match.start())
    return [
        Name(index, at[0], at[1], match[1])
        for match in _DEFINITION.finditer(text)
        if len(at := positions[match[1]]) > 1 and at[0] == match.start(1)
    ]
