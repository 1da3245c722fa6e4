"""The short causal convolution: depthwise, over time, with an optional SiLU."""
