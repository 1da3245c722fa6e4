"""One pool of processes for all tests of split sequences."""

from tokenmix_core.testing.rank_pool import pool  # noqa: F401
