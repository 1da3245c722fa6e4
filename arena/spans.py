"""Hashes of spans of bytes, to find repeated text: of windows of whole lines, or of all spans of one length."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Int, UInt64

# length in bytes of the spans that must not occur in both training and held-out text
SPAN = 64
# base of the hash: odd, so that it has an inverse modulo 2**64, the range of the hashes
_BASE = 0x9E3779B97F4A7C15
_MOST_BUCKETS = 2**28


class _Powers:
    """Powers of the base, and of its inverse modulo 2**64, up to the length of the longest text so far."""

    def __init__(self) -> None:
        self.of_base, self.of_inverse = (np.ones(1, np.uint64),) * 2

    def reserve(self, count: int) -> None:
        """Compute further powers of the base and of its inverse until there are at least `count` of each."""
        if count > len(self.of_base):
            count = max(count, 2**20)
            self.of_base, self.of_inverse = (
                np.multiply.accumulate(np.array([1, *[base] * (count - 1)], np.uint64))
                for base in (_BASE, pow(_BASE, -1, 2**64))
            )


_powers = _Powers()


class Hashes:
    """Prefix sums of a text, by which the hash of any span of it can be computed.

    Args:
        text: UTF-8 bytes.
    """

    def __init__(self, text: bytes) -> None:
        self.data = np.frombuffer(text, np.uint8)
        _powers.reserve(len(text) + 1)
        self._sums = np.zeros(len(text) + 1, np.uint64)
        # add one, so that zero bytes also contribute to the hash
        np.cumsum((self.data + np.uint64(1)) * _powers.of_base[: len(text)], out=self._sums[1:])

    def spans(self, starts: Int[np.ndarray, "n"], ends: Int[np.ndarray, "n"]) -> UInt64[np.ndarray, "n"]:
        """Return the hashes of the spans `[start, end)`; equal spans have equal hashes."""
        return _mixed((self._sums[ends] - self._sums[starts]) * _powers.of_inverse[starts])

    def all_spans(self, size: int = SPAN) -> UInt64[np.ndarray, "n"]:
        """Return the hashes of the spans with `size` bytes at all offsets."""
        count = max(0, len(self.data) - size + 1)
        return _mixed((self._sums[size:] - self._sums[:count]) * _powers.of_inverse[:count])

    def line_ends(self) -> Int[np.ndarray, "L"]:
        """Return the position after the end of each line; the line break belongs to its line."""
        ends = np.flatnonzero(self.data == ord("\n")) + 1
        return ends if len(ends) and ends[-1] == len(self.data) else np.append(ends, len(self.data))

    def windows(self, least: int) -> tuple[UInt64[np.ndarray, "n"], Int[np.ndarray, "n"], Int[np.ndarray, "n"]]:
        """Return hash, first and last line of each line's window: the fewest lines from it on with at least `least`
        bytes. A line after which too few bytes follow has no window.
        """
        ends = self.line_ends()
        starts = np.concatenate([[0], ends[:-1]])
        last = np.searchsorted(ends, starts + least)
        first = np.flatnonzero(last < len(ends))
        last = last[first]
        return self.spans(starts[first], ends[last]), first, last


def _mixed(hashes: UInt64[np.ndarray, "n"]) -> UInt64[np.ndarray, "n"]:
    # mix the bits: the low bits of a polynomial hash have little information
    hashes ^= hashes >> np.uint64(31)
    hashes *= np.uint64(0xBF58476D1CE4E5B9)
    hashes ^= hashes >> np.uint64(29)
    return hashes


class SpanSet:
    """A set of hashes for looking up many others; a table with a byte per bucket quickly excludes most of these."""

    def __init__(self, hashes: Sequence[UInt64[np.ndarray, "_"]]) -> None:
        self.hashes = np.unique(np.concatenate([*hashes, np.zeros(0, np.uint64)]))
        buckets = min(_MOST_BUCKETS, 1 << (16 * len(self.hashes) + 1).bit_length())
        self._shift = np.uint64(64 - buckets.bit_length() + 1)
        self._table = np.zeros(buckets, bool)
        self._table[self.hashes >> self._shift] = True

    def __len__(self) -> int:
        return len(self.hashes)

    def index(self, asked: UInt64[np.ndarray, "n"]) -> tuple[Int[np.ndarray, "n"], Bool[np.ndarray, "n"]]:
        """Return the position in `hashes` of each hash in `asked` (undefined if missing), and a mask of members."""
        if not len(self.hashes):
            return np.zeros(len(asked), np.int64), np.zeros(len(asked), bool)
        at = np.searchsorted(self.hashes, asked)
        at[at == len(self.hashes)] = 0
        return at, self.hashes[at] == asked

    def find(self, asked: UInt64[np.ndarray, "n"]) -> Int[np.ndarray, "m"]:
        """Return the positions in `hashes` of those hashes in `asked` that are members of the set."""
        at, members = self.index(asked[self._table[asked >> self._shift]])
        return np.unique(at[members])


def covered(count: int, first: Int[np.ndarray, "n"], last: Int[np.ndarray, "n"]) -> Bool[np.ndarray, "count"]:
    """Return a mask of `count` items: True in at least one of the ranges from `first` to `last`, both included."""
    change = np.zeros(count + 1, np.int64)
    np.add.at(change, first, 1)
    np.add.at(change, last + 1, -1)
    return np.cumsum(change[:-1]) > 0


def without(text: bytes, ends: Int[np.ndarray, "L"], removed: Bool[np.ndarray, "L"]) -> bytes:
    """Return a text without the removed lines; `ends` is the result of `line_ends`."""
    if not removed.any():
        return text
    keep = np.repeat(~removed, np.diff(ends, prepend=0))
    return np.frombuffer(text, np.uint8)[keep].tobytes()
