"""Random streams by name: streams with different names draw different values, whatever their seeds and indices."""

from __future__ import annotations

import hashlib
import json

import numpy as np

# version of the random streams that training rows are drawn from; a run resumes only with the version it began with
VERSION = 3


def stream(name: str, *key: int) -> np.random.Generator:
    """Return the random generator for a use, given its `name` and `key`, such as a seed and the index of a row.

    Name and key are hashed together, so that another name, key or length of the key gives another stream. NumPy itself
    would pad keys with zeros, so that (1, 2) and (1, 2, 0) would give the same stream.
    """
    digest = hashlib.blake2b(json.dumps([name, *map(int, key)]).encode(), digest_size=16).digest()
    return np.random.default_rng(int.from_bytes(digest))
