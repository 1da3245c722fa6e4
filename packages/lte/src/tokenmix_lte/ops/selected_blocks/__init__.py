"""Attention of each query to the blocks of keys in the query's list, and the selection of these blocks."""
