"""Folders written at commit 09852bb load and continue."""

from pathlib import Path

from support.saved import SavedContract
from tokenmix_oryx.cli import main


class TestSaved(SavedContract):
    folder = Path(__file__).parent / "saved_at_09852bb"
    main = staticmethod(main)
