"""Test that folders written at commit 09852bb load, and that their runs continue."""

from pathlib import Path

from support.saved import SavedContract
from tokenmix_core.cli.app import main


class TestSaved(SavedContract):
    folder = Path(__file__).parent / "saved_at_09852bb"
    main = staticmethod(main)
