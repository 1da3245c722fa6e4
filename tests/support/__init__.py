"""Helpers that the tests of all packages share; no distribution contains them."""
