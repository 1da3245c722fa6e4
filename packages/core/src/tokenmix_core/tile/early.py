"""Kernels that begin while the one ahead of them ends; see `launch.early`. Without EARLY nothing is compiled of it."""

import triton
import triton.language as tl


@triton.jit
def let_next_begin(EARLY: tl.constexpr):
    """From here on the next kernel may begin where there is room, if it is one that waits."""
    if EARLY:
        tl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def await_kernels_before(EARLY: tl.constexpr):
    """Wait until the kernels before have ended: nothing that they write is read earlier, and nothing is written."""
    if EARLY:
        tl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def take_turn(EARLY: tl.constexpr):
    """Let the next kernel begin, and wait for those before: saves a launch's time alone."""
    let_next_begin(EARLY)
    await_kernels_before(EARLY)
