"""The gates of slots, and of gated linear attention, computed from their logits."""
