"""Serving: an engine in which each request has its own sampling settings, and an OpenAI-compatible server."""

from typing import TYPE_CHECKING

from tokenmix_core._utils.lazy_imports import lazily

if TYPE_CHECKING:
    from tokenmix_core.serving.engine import Engine as Engine
    from tokenmix_core.serving.sampling import Sampling as Sampling
    from tokenmix_core.serving.server import build_app as build_app

__getattr__ = lazily(__name__)
