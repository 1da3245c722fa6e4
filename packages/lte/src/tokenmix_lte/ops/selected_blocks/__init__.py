"""Attention in which each query names the blocks of keys that it sees, and the choice of these blocks."""
