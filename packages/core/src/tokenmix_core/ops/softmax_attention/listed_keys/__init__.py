"""Gradients of K and V for lists of keys: the sinks of a window, or sparse attention's retained and other keys."""
