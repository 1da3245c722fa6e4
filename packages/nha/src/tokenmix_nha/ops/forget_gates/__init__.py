"""Compute the gates of slots and of gated linear attention from their logits."""
