"""The short causal convolution, depthwise, with an optional SiLU."""
