"""How kernels are launched: compiled side by side, started with little host time, recorded calls repeated."""

from tokenmix_core.kernels.launch.flags import recording

__all__ = ["recording"]
