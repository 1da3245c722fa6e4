"""Tools to write and launch kernels: the public surface for kernel authors.

`triton/` and `gluon/` hold device functions, `launch/` launches kernels and caches calls, `tuning` chooses tiles.
"""

from typing import TYPE_CHECKING

from tokenmix_core._utils.lazy_imports import lazily

if TYPE_CHECKING:
    from tokenmix_core.kernels.launch.async_read import Asked as Asked
    from tokenmix_core.kernels.launch.cache.capture import is_plain as is_plain
    from tokenmix_core.kernels.launch.cache.replay import Checked as Checked
    from tokenmix_core.kernels.launch.cache.replay import Replayed as Replayed
    from tokenmix_core.kernels.launch.cache.row_calls import RowCall as RowCall
    from tokenmix_core.kernels.launch.launcher import cached_launch as cached_launch
    from tokenmix_core.kernels.launch.launcher import compiled_together as compiled_together
    from tokenmix_core.kernels.pdl import gdc_launch_and_wait as gdc_launch_and_wait
    from tokenmix_core.kernels.triton.decay import LOG2_E as LOG2_E
    from tokenmix_core.kernels.triton.precision import FLOAT32_DOT as FLOAT32_DOT
    from tokenmix_core.kernels.triton.varlen import locate_chunk as locate_chunk
    from tokenmix_core.kernels.triton.varlen import locate_slot as locate_slot
    from tokenmix_core.kernels.tuning import one_wave as one_wave
    from tokenmix_core.kernels.tuning import override as override
    from tokenmix_core.kernels.tuning import sm_count as sm_count

__getattr__ = lazily(__name__)
