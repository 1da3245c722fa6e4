"""Modules with parameters, without transformers: norms, rotary positions, MLP, loss and the baseline mixers."""
