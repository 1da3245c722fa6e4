"""Decide which calls to capture: those whose signature has occurred often enough, in bounded memory."""

from __future__ import annotations

from collections import deque
from itertools import islice, takewhile

from torch import Tensor

# maximum counts, for each function, of signatures whose occurrences are counted, of stored magnitudes (see
# `new_magnitude`), and of kinds (see `kind_of`) whose captures are remembered
MAX_SEEN, _MAX_MAGNITUDES, _MAX_KINDS = 512, 128, 32
# if one of a kind's _RECENT last captures was replayed _OFTEN times, as happens in deep models, the next new signature
# is captured at its first occurrence
_RECENT, _OFTEN = 4, 3
# this many consecutive captures without a replay double the number of occurrences that a capture needs
_PATIENCE = 8


class Admission:
    """Count occurrences of the signatures of one function's calls."""

    def __init__(self) -> None:
        # maps a signature's hash to the number of its occurrences; the latest signature is last
        self._seen: dict[int, int] = {}
        self._magnitudes: dict[tuple, None] = {}
        # for each kind and each of its last captures, the number of replays; the newest capture is first
        self._replays: dict[tuple, deque[list[int]]] = {}

    def new_magnitude(self, inputs: tuple) -> tuple | None:
        """Return the magnitude of a call: its dtypes, options and bit lengths of sizes; None if it was added before.

        New magnitudes may select other kernels, which are compiled in parallel if the call is captured.
        """
        magnitude = tuple(
            (x.dtype, *map(int.bit_length, x.shape)) if isinstance(x, Tensor)
            else x.bit_length() if x.__class__ is int else x
            for x in inputs
        )  # fmt: skip
        return None if magnitude in self._magnitudes else magnitude

    def add_magnitude(self, magnitude: tuple | None) -> None:
        """Remember a magnitude, so that `new_magnitude` returns None for it."""
        if magnitude is not None:
            self._magnitudes[magnitude] = None
            keep_last(self._magnitudes, _MAX_MAGNITUDES)

    def count(self, signature: tuple, inputs: tuple) -> bool:
        """Count an occurrence of the signature of these inputs; tell whether the call should be captured."""
        mark = hash(signature)
        times = self._seen.pop(mark, 0) + 1
        if times >= self._needed(kind_of(inputs)):
            return True
        self._seen[mark] = times
        keep_last(self._seen, MAX_SEEN)
        return False

    def captured(self, inputs: tuple, replays: list[int]) -> None:
        """Note that a call with these inputs was captured; `replays[0]` counts its replays."""
        self._replays.setdefault(kind_of(inputs), deque(maxlen=4 * _PATIENCE)).appendleft(replays)
        keep_last(self._replays, _MAX_KINDS)

    def _needed(self, kind: tuple) -> int:
        captures = self._replays.get(kind, ())
        if any(x[0] >= _OFTEN for x in islice(captures, _RECENT)):
            return 1
        unused = sum(1 for _ in takewhile(lambda x: not x[0], captures))
        return 2 << unused // _PATIENCE


def kind_of(inputs: tuple) -> tuple:
    """Return the inputs' classes: a call with an optional input may be rare where calls without it are frequent."""
    return tuple([x.__class__ for x in inputs])


def keep_last(entries: dict, most: int) -> None:
    """Drop the oldest entries of a dict until it has at most `most`."""
    while len(entries) > most:
        entries.pop(next(iter(entries)), None)
