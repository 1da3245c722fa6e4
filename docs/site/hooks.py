"""What mkdocs asks while it builds the site: the pages and pictures, and the order they stand in."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).parent))
import pages


@cache
def _site() -> pages.Site:
    return pages.build()


def on_config(config: Any) -> Any:
    """Set the navigation."""
    config.nav = _site().nav
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add what is made from the repository."""
    for uri, text in _site().pages.items():
        files.append(File.generated(config, uri, content=text))
    for uri, path in _site().files.items():
        files.append(File.generated(config, uri, content=path.read_bytes()))
    return files
