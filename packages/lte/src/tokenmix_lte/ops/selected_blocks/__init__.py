"""Attention of each query to the blocks of keys that it lists, and the selection of these blocks."""
