"""The dK/dV kernel for keys given in lists: the sinks of a window, or sparse attention's retained and other keys."""
