"""Common parts of the tests of training: a small corpus, and the module with their runs."""

import os
import sys
from pathlib import Path

import pytest

# processes that a test starts import this module, too
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session", autouse=True)
def _one_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TOKENMIX_CACHE", str(tmp_path_factory.mktemp("cache")))
        # the server from which processes are forked finds its modules by this path
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        yield


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """Write a token file of bytes from 40 documents of unequal lengths."""
    from support.corpora import token_file

    words = ([f"word{(i * 7 + j * j) % 23}" for j in range(3 + 5 * (i % 9))] for i in range(40))
    return token_file(tmp_path_factory.mktemp("corpus"), (" ".join(x) + "." for x in words))
