"""Attention in which each query lists the blocks of keys that it sees, and the selection of these blocks."""
