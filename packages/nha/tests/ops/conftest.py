"""Makes `machine_code`, a helper of the tests of kernels, importable."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
