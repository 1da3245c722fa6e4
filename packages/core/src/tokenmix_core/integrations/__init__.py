"""The field: other libraries' call signatures, other people's models on our kernels, other layouts of checkpoints."""
