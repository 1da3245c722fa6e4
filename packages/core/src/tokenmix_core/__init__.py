"""Everything that hybrid token mixers need: kernels, modules, a causal language model, training and evaluation.

Importing this package is fast, uses no device, and works without Triton and without a GPU.
"""

from typing import TYPE_CHECKING

from tokenmix_core._utils.auto_registration import announce as announce
from tokenmix_core._utils.lazy_imports import lazily as lazily

__version__ = "0.1.0"

announce({"tokenmix_hybrid": "tokenmix_core.modeling"})

if TYPE_CHECKING:
    from tokenmix_core._utils.atomic_io import check_new_folder as check_new_folder
    from tokenmix_core._utils.atomic_io import write_atomically as write_atomically
    from tokenmix_core._utils.lazy_imports import lazily as lazily
    from tokenmix_core._utils.optional import require as require
    from tokenmix_core._utils.rng import stream as stream
    from tokenmix_core._utils.trust import from_pretrained as from_pretrained
    from tokenmix_core._utils.validation import check_value as check_value
    from tokenmix_core._utils.validation import undefined as undefined

__getattr__ = lazily(__name__)
