"""Test contracts, fixtures, error measures against float64, an emulator of Gluon, and benchmarks against baselines."""
