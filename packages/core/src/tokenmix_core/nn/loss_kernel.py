"""Kernel that computes losses from logits and overwrites the logits by their gradient, in two passes over each row."""

import triton
import triton.language as tl
from torch import Tensor

from tokenmix_core.kernels.launch.launcher import cached_launch
from tokenmix_core.kernels.triton.decay import LOG2_E


@cached_launch
@triton.jit
def softmax_gradient_kernel(
    logits, labels, losses, stride, V, W, ignore_index, BV: tl.constexpr, GRADIENT: tl.constexpr
):  # fmt: skip
    """Store the loss of one token per program; with GRADIENT, overwrite its logits by their gradient.

    V is the vocabulary size. W, the number of logits with padding, is a multiple of 64: masks by V would prevent
    vectorised loads."""
    i_t = tl.program_id(0).to(tl.int64)
    p_l = logits + i_t * stride
    label = tl.load(labels + i_t)
    o_v = tl.arange(0, BV)
    if label == ignore_index:
        tl.store(losses + i_t, 0.0)
        if GRADIENT:
            for first in range(0, W, BV):
                tl.store(p_l + first + o_v, tl.zeros([BV], logits.dtype.element_ty), mask=first + o_v < W)
        return
    # the logit of a label outside the vocabulary is NaN, which makes the loss NaN
    target = tl.load(p_l + label, mask=(label >= 0) & (label < V), other=float("nan")).to(tl.float32)
    # `top`: running maximum of the logits; `total`: the sum of their exponentials relative to it
    top, total = target, 0.0
    for first in range(0, W, BV):
        b_l = tl.load(p_l + first + o_v, mask=first + o_v < W, other=float("-inf")).to(tl.float32)
        b_l = tl.where(first + o_v < V, b_l, float("-inf"))
        above = tl.maximum(top, tl.max(b_l, 0))
        total = total * tl.exp2((top - above) * LOG2_E) + tl.sum(tl.exp2((b_l - above) * LOG2_E), 0)
        top = above
    tl.store(losses + i_t, top + tl.log(total) - target)
    if GRADIENT:
        for first in range(0, W, BV):
            b_l = tl.load(p_l + first + o_v, mask=first + o_v < W, other=float("-inf")).to(tl.float32)
            b_l = tl.where(first + o_v < V, b_l, float("-inf"))
            b_d = tl.exp2((b_l - top) * LOG2_E) / total - tl.where(first + o_v == label, 1.0, 0.0)
            tl.store(p_l + first + o_v, b_d.to(logits.dtype.element_ty), mask=first + o_v < W)


def softmax_gradient_(
    logits: Tensor, words: int, labels: Tensor, losses: Tensor, ignore_index: int, *, gradient: bool
) -> None:
    """Write lse(logits) − logits[label] to `losses`, 0 at `ignore_index`; with `gradient`, logits become the gradient.

    Args:
        logits: `[tokens, W]`, rows of one stride; columns from V on are padding, whose gradient is 0.
        words: V ≤ W.
        labels: `[tokens]` int64.
        losses: `[tokens]` float32.
    """
    tokens, W = logits.shape
    if tokens:
        softmax_gradient_kernel[(tokens,)](
            logits=logits, labels=labels, losses=losses, stride=logits.stride(0), V=words, W=W,
            ignore_index=ignore_index, BV=4096, GRADIENT=gradient, num_warps=8,  # type: ignore
        )  # fmt: skip
