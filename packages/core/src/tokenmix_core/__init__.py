"""The needs of every hybrid token mixer: kernels, modules, a causal language model, training and evaluation.

Importing this package is quick, touches no device and needs neither Triton nor a GPU.
"""

from tokenmix_core.families import announce

__version__ = "0.1.0"

announce({"tokenmix_hybrid": "tokenmix_core.modeling"})
