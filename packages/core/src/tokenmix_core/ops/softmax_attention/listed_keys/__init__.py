"""Gradients of K and V over lists of keys: the sinks of a window, or sparse attention's retained and other keys."""
