"""The product inside a SwiGLU, alone and with the linear layer behind it."""
