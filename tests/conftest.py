"""Import folders of the repository's root, such as `arena`, from their place, because no distribution contains them."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
