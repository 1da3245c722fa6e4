"""Random streams by name: two uses never draw equal values, whatever their seeds and indices."""

from __future__ import annotations

import hashlib
import json

import numpy as np

# version of the streams that training rows are drawn from: a run continues only with the version it began with
VERSION = 3


def stream(name: str, *key: int) -> np.random.Generator:
    """Return the random generator of the use `name` at `key`, such as a seed and a row's index.

    Name and key are hashed together, so different names, keys and lengths of keys give different streams. NumPy's seeds
    do not: it pads (1, 2) with zeros, so (1, 2) and (1, 2, 0) are equal.
    """
    digest = hashlib.blake2b(json.dumps([name, *map(int, key)]).encode(), digest_size=16).digest()
    return np.random.default_rng(int.from_bytes(digest))
