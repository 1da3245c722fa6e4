"""Merge the outputs of two operations: norm, weighted sum and gate."""
