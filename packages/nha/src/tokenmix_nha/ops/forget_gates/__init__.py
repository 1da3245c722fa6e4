"""The gates of slots and of gated linear attention, from their projection."""
