"""Native Hybrid Attention (Du et al.): memory slots and a sliding window under one softmax.

Importing this package is quick, touches no device and needs neither Triton nor a GPU.
"""

__version__ = "0.1.0"
