"""For tests and benchmarks: contracts, fixtures, errors against float64, a Gluon emulator, timing beside baselines."""
