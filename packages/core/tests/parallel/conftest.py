"""One pool of processes for all tests of split sequences."""

from support.rank_pool import pool  # noqa: F401
