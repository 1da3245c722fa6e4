"""Programmatic dependent launch in portable kernels (see `launch.pdl`): compiled only if `PDL` is set."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def gdc_launch_and_wait(PDL: tl.constexpr):
    """Let the next kernel start, then wait for the earlier kernels; this hides the launch latency and nothing else.

    After `gdc_launch_dependents` the next kernel starts on free SMs if it is launched with `launch_pdl`. Before
    `gdc_wait` a kernel must not read data that a kernel before it writes, nor write data that one reads or writes.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
