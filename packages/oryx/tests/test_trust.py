"""No command of this package runs code from a model's folder without --trust-remote-code."""

from support.trust import TrustContract
from tokenmix_oryx.cli import main


class TestTrust(TrustContract):
    main = staticmethod(main)
