"""One pool of processes for all tests of split sequences."""

import pytest

from tokenmix_core.testing.rank_pool import RankPool


@pytest.fixture(scope="session")
def pool():
    pool = RankPool(4)
    yield pool
    pool.close()
