"""For tests and benchmarks: contracts, fixtures, closeness to float64, a stand-in for Gluon, timing beside peers."""
