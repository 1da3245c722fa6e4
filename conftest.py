"""Loaded before every test of the workspace, and before torch."""

import os

# OpenMP's threads sleep at barriers instead of spinning, so that test processes can share cores
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
