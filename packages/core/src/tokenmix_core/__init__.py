"""What every hybrid token mixer needs: kernels, modules, a causal language model, training and evaluation.

Importing this package is quick, touches no device and needs neither Triton nor a GPU.
"""

__version__ = "0.1.0"
