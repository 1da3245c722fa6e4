"""Shared by the tests of all packages of this repository, and in no distribution."""
