"""Fixtures: kernels run on a GPU if there is one, else in Triton's interpreter; tests marked `gpu` need a GPU."""

from support.rank_pool import pool  # noqa: F401
from tokenmix_core.testing.fixtures import (  # noqa: F401
    device,
    kernels_are_interpreted_quickly,
    launch_cache_is_empty,
    override,
    pytest_collection_modifyitems,
    pytest_runtest_setup,
    unwritten_memory_is_nan,
)
