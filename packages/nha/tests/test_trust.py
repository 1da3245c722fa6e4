"""No command of this package runs code from a model's folder without --trust-remote-code."""

from typing import ClassVar

from support.trust import TrustContract
from tokenmix_nha.cli import main


class TestTrust(TrustContract):
    main = staticmethod(main)
    calls: ClassVar = {"convert": "--out OUT", "finetune": "--stage 1 --out OUT", "search": "--task mqar"}
