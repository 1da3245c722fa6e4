"""Named random streams: uses with different names never draw equal values, whatever their seeds and indices."""

from __future__ import annotations

import hashlib
import json

import numpy as np

# version of the streams that rows are drawn from; a run can only be resumed with the version that it began with
VERSION = 3


def stream(name: str, *key: int) -> np.random.Generator:
    """Return a random generator for the use `name` and `key`, such as a seed and the index of a row.

    Name and key are hashed together, so different names, keys and lengths of keys give different streams. NumPy alone
    pads keys with zeros, so that (1, 2) and (1, 2, 0) give the same stream.
    """
    digest = hashlib.blake2b(json.dumps([name, *map(int, key)]).encode(), digest_size=16).digest()
    return np.random.default_rng(int.from_bytes(digest))
