"""Make `machine_code`, a helper of the kernel tests, importable."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
