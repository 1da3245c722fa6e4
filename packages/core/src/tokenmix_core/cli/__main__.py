"""`python -m tokenmix_core.cli`."""

import sys

from tokenmix_core.cli.app import main

if __name__ == "__main__":
    sys.exit(main())
