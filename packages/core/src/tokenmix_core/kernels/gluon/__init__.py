"""Device functions of Gluon kernels for Hopper: layouts, async copies, mbarriers, online softmax."""

from typing import TYPE_CHECKING

from tokenmix_core._utils.lazy_imports import lazily

if TYPE_CHECKING:
    from tokenmix_core.kernels.gluon.hopper import LOG2_E as LOG2_E
    from tokenmix_core.kernels.gluon.hopper import async_copy_rows as async_copy_rows
    from tokenmix_core.kernels.gluon.hopper import async_load as async_load
    from tokenmix_core.kernels.gluon.hopper import barrier as barrier
    from tokenmix_core.kernels.gluon.hopper import mma_layout as mma_layout
    from tokenmix_core.kernels.gluon.hopper import mma_layout_split_n as mma_layout_split_n
    from tokenmix_core.kernels.gluon.hopper import opaque as opaque
    from tokenmix_core.kernels.gluon.hopper import opaque_tile as opaque_tile
    from tokenmix_core.kernels.gluon.hopper import reinterpret as reinterpret
    from tokenmix_core.kernels.gluon.hopper import row_layout as row_layout
    from tokenmix_core.kernels.gluon.hopper import sequence_span as sequence_span
    from tokenmix_core.kernels.gluon.hopper import wait_async_copies as wait_async_copies

__getattr__ = lazily(__name__)
