"""How kernels are launched: compiled side by side, started with little host time, recorded calls repeated."""

from tokenmix_core.launch.switch import recording

__all__ = ["recording"]
