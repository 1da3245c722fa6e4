"""The root's own folders, such as `arena`, are imported as they are: they are in no distribution."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
