"""Gradients of listed keys: a window's sinks, and the retained and other keys of sparse attention."""
