"""Streams of random numbers by name: two uses never see the same numbers, whatever seeds and indices they count by."""

from __future__ import annotations

import hashlib
import json

import numpy as np

# what training rows are drawn from changed with this number, so that a run goes on only with the rows it began with
VERSION = 3


def stream(name: str, *key: int) -> np.random.Generator:
    """The random numbers of the use `name` at `key`, such as a seed and a row's index.

    Name and key are hashed together: another name, another key and a key of another length each give numbers of their
    own. NumPy's own seeds do not: it fills (1, 2) up with zeros and so takes it for (1, 2, 0).
    """
    digest = hashlib.blake2b(json.dumps([name, *map(int, key)]).encode(), digest_size=16).digest()
    return np.random.default_rng(int.from_bytes(digest))
