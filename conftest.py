"""Loaded before every test of the workspace, and before torch."""

import os

# OpenMP's threads sleep at barriers instead of spinning, so that test processes can share cores
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def pytest_report_header(config):
    """Say before benchmarks start what they need and how long they take."""
    if not getattr(config.option, "benchmark_only", False):
        return None
    import torch

    from tokenmix_core.testing.benchmarking import WITHOUT_GPU

    if not torch.cuda.is_available():
        return f"{WITHOUT_GPU}: all take about three minutes on two cores, `-k test_measure` about one"
    return "the first run compiles every kernel and takes hours; `-k test_measure` leaves out what no table shows"
