"""Cross-entropy of a linear layer's outputs, by blocks of tokens: logits `[tokens, vocab]` never exist as a whole."""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from tokenmix_core._utils.optional import install_command
from tokenmix_core.kernels.launch import compat
from tokenmix_core.nn.dtypes import at_least_float32, has_float32_output
from tokenmix_core.ops.transforms import refuse_graph

IGNORE = -100
# tokens per block: with a vocabulary of 50,000, a block's bfloat16 logits take 200 MB
BLOCK = 2048
# rows of logits are padded to a multiple of this number of vocabulary entries: GEMMs with unaligned rows are slow on a
# GPU
_MULTIPLE = 64
LossImpl = Literal["triton", "torch", "liger"]
LOSS_IMPLS = (None, *get_args(LossImpl))


def linear_cross_entropy(
    hidden: Float[Tensor, "tokens D"],
    weight: Float[Tensor, "vocab D"],
    labels: Int[Tensor, "tokens"],
    *,
    ignore_index: int = IGNORE,
    block_size: int = BLOCK,
    impl: LossImpl | None = None,
) -> Float[Tensor, ""]:
    r"""Return the sum over tokens of −log softmax(weight · hidden)[label], float32 (float64 for float64 inputs).

    .. math:: L = \sum_{t:\, y_t \ne \text{ignore}} \Big(\log \sum_w e^{W_w \cdot h_t} - W_{y_t} \cdot h_t\Big)

    The forward pass computes the gradients of hidden and weight together with the loss, block by block, and saves them
    instead of logits; the weight's gradient is accumulated in float32. Under autocast the GEMMs run in autocast's
    dtype.

    Args:
        hidden: `[tokens, D]`.
        weight: `[vocab, D]`.
        labels: `[tokens]` int64; tokens with the label `ignore_index` are skipped.
        block_size: tokens whose logits exist at the same time.
        impl: "triton", "torch", "liger" (needs the extra `fast` and CUDA tensors), or None: "triton" for CUDA tensors
            that are not float64, else "torch".

    Raises:
        ValueError: shapes, dtypes or the implementation do not fit.
    """
    if hidden.dim() != 2 or weight.dim() != 2 or labels.dim() != 1:
        got = f"{list(hidden.shape)}, {list(weight.shape)}, {list(labels.shape)}"
        raise ValueError(
            f"linear_cross_entropy: expected hidden [tokens, D], weight [vocab, D], labels [tokens], got {got}"
        )
    if hidden.shape[1] != weight.shape[1] or hidden.shape[0] != labels.shape[0]:
        raise ValueError(
            f"linear_cross_entropy: hidden {list(hidden.shape)} fits neither weight {list(weight.shape)} in D "
            f"nor labels {list(labels.shape)} in tokens"
        )
    if labels.device != hidden.device:
        raise ValueError(f"linear_cross_entropy: labels are on {labels.device}, expected {hidden.device} like hidden")
    if weight.device != hidden.device:
        raise ValueError(
            f"linear_cross_entropy: weight is on {weight.device}, expected {hidden.device} like hidden; "
            "call a layer that is offloaded, and take the loss of its logits"
        )
    if labels.dtype != torch.int64:
        raise ValueError(f"linear_cross_entropy: labels must be int64, got {labels.dtype}")
    if block_size < 1:
        raise ValueError(f"linear_cross_entropy: block_size must be at least 1, got {block_size}")
    if impl not in LOSS_IMPLS:
        raise ValueError(f"linear_cross_entropy: impl must be one of {LOSS_IMPLS}, got {impl!r}")
    if impl == "triton" and hidden.dtype == torch.float64:
        raise ValueError("linear_cross_entropy: impl='triton' takes no float64; use impl='torch'")
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        hidden = hidden.to(torch.get_autocast_dtype(device))
    if impl == "liger":
        return _liger(hidden, weight.to(hidden.dtype), labels, ignore_index)
    if compat.in_transform():
        return _summed(hidden, weight, labels, ignore_index, block_size)
    fused = impl == "triton" or (impl is None and device == "cuda" and hidden.dtype != torch.float64)
    with torch.autocast(device, enabled=False):
        return _LinearCrossEntropy.apply(hidden, weight, labels, ignore_index, block_size, fused)


def _summed(hidden: Tensor, weight: Tensor, labels: Tensor, ignore_index: int, block_size: int) -> Tensor:
    """Return the loss, computed with torch operations only, so that `torch.func` can transform it."""
    parts = zip(hidden.split(block_size), labels.split(block_size), strict=True)
    losses = [
        F.cross_entropy(at_least_float32(h @ weight.to(h.dtype).T), y, ignore_index=ignore_index, reduction="sum")
        for h, y in parts
    ]
    return torch.stack(losses).sum()


def at_least_one(items: Tensor | int) -> Tensor | int:
    """Clamp a number of predicted tokens to at least 1: the mean loss over no tokens is then 0, not NaN."""
    return items.clamp(min=1) if isinstance(items, Tensor) else max(items, 1)


@torch.no_grad()
def token_losses(
    hidden: Float[Tensor, "tokens D"],
    weight: Float[Tensor, "vocab D"],
    labels: Int[Tensor, "tokens"],
    *,
    ignore_index: int = IGNORE,
    block_size: int = BLOCK,
) -> Float[Tensor, "tokens"]:
    """Return −log softmax(weight · hidden)[label] of each token, 0 where the label is `ignore_index`; no gradient."""
    words, weight = len(weight), _padded(weight, hidden.dtype)
    losses = [
        F.cross_entropy(at_least_float32((h @ weight.T)[:, :words]), y, ignore_index=ignore_index, reduction="none")
        for h, y in zip(hidden.split(block_size), labels.split(block_size), strict=True)
    ]
    return torch.cat(losses) if losses else at_least_float32(hidden.new_zeros(0))


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, labels, ignore_index, block_size, fused):
        loss, d_hidden, d_weight = _blockwise(
            hidden, weight, labels, ignore_index, block_size, fused, *ctx.needs_input_grad[:2]
        )
        ctx.save_for_backward(d_hidden, d_weight)
        ctx.weight_dtype = weight.dtype
        return loss

    @staticmethod
    def backward(ctx, grad):
        refuse_graph("linear_cross_entropy")
        d_hidden, d_weight = ctx.saved_tensors
        d_hidden = (d_hidden * grad).to(d_hidden.dtype) if ctx.needs_input_grad[0] else None
        d_weight = (d_weight * grad).to(ctx.weight_dtype) if ctx.needs_input_grad[1] else None
        return d_hidden, d_weight, None, None, None, None


# a custom operator, because torch.compile would unroll the loop over blocks
@torch.library.custom_op("tokenmix::linear_cross_entropy", mutates_args=())
def _blockwise(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    ignore_index: int,
    block_size: int,
    fused: bool,
    needs_d_hidden: bool,
    needs_d_weight: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    words, w = len(weight), _padded(weight, hidden.dtype)
    loss = hidden.new_zeros((), dtype=wide)
    d_hidden, d_weight = _gradients(hidden, w, weight.dtype, needs_d_hidden, needs_d_weight, zero=True)
    gradient_ = _fused_gradient_ if fused else _eager_gradient_
    for start in range(0, hidden.shape[0], block_size):
        rows = slice(start, start + block_size)
        h, y = hidden[rows], labels[rows]
        logits = h @ w.T
        loss += gradient_(logits, words, y, ignore_index, needs_d_hidden or needs_d_weight)
        if needs_d_hidden:
            torch.mm(logits, w, out=d_hidden[rows])
        if needs_d_weight:
            _add_matmul(d_weight, logits.T, h)
    return loss, d_hidden, d_weight[:words]


def _padded(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weight in `dtype`, padded with zero rows to a multiple of `_MULTIPLE`."""
    spare = -len(weight) % _MULTIPLE
    weight = weight.to(dtype)
    return F.pad(weight, (0, 0, 0, spare)) if spare else weight


def _add_matmul(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add the matmul a b to total in place; in one GEMM if total is float32 and a 16-bit GEMM can return float32."""
    if total.dtype == torch.float32 and has_float32_output(a):
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total += a @ b


def _eager_gradient_(logits: Tensor, words: int, labels: Tensor, ignore_index: int, wanted: bool) -> Tensor:
    """Return the summed loss of a block of logits; if `wanted`, overwrite the logits with their gradient.

    Columns of logits from `words` on are padding; their gradient is 0.
    """
    counts = (labels != ignore_index).unsqueeze(1)
    target = labels.unsqueeze(1).masked_fill(~counts, 0)
    wide = at_least_float32(logits[:, :words])
    lse = wide.logsumexp(1, keepdim=True)
    loss = ((lse - wide.gather(1, target)) * counts).sum()
    if wanted:
        # softmax − onehot; this overwrites the logits themselves if they are float32 or float64
        wide.sub_(lse).exp_().mul_(counts)
        wide.scatter_add_(1, target, -counts.to(wide.dtype))
        logits[:, :words] = wide
        logits[:, words:] = 0
    return loss


def _fused_gradient_(logits: Tensor, words: int, labels: Tensor, ignore_index: int, wanted: bool) -> Tensor:
    """Compute the same as `_eager_gradient_`, in one kernel."""
    from tokenmix_core.nn.loss_kernel import softmax_gradient_

    losses = torch.empty(len(labels), dtype=torch.float32, device=logits.device)
    # Triton launches on the current device, which may not be that of the tensors
    with torch.cuda.device_of(logits):
        softmax_gradient_(logits, words, labels.contiguous(), losses, ignore_index, gradient=wanted)
    return losses.sum()


@_blockwise.register_fake
def _(hidden, weight, labels, ignore_index, block_size, fused, needs_d_hidden, needs_d_weight):
    wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    gradients = _gradients(hidden, weight, weight.dtype, needs_d_hidden, needs_d_weight, zero=False)
    return hidden.new_empty((), dtype=wide), *gradients


def _gradients(
    hidden: Tensor, weight: Tensor, dtype: torch.dtype, needs_d_hidden: bool, needs_d_weight: bool, zero: bool
):
    """Allocate the gradient of hidden, in hidden's dtype, and that of weight, in float32 or, for float64, float64.

    `dtype` is the weight's. An unneeded gradient is empty. With `zero`, the gradient of weight is filled with zeros.
    """
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    d_hidden = torch.empty_like(hidden) if needs_d_hidden else hidden.new_empty(0)
    shape = weight.shape if needs_d_weight else (0,)
    d_weight = weight.new_zeros(shape, dtype=wide) if zero else weight.new_empty(shape, dtype=wide)
    return d_hidden, d_weight


def _liger(hidden: Tensor, weight: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
    if not hidden.is_cuda:
        raise ValueError(
            f"linear_cross_entropy: impl='liger' needs CUDA tensors, got {hidden.device}; use impl='torch'"
        )
    try:
        from liger_kernel.transformers.functional import (  # type: ignore[import-not-found]
            liger_fused_linear_cross_entropy,
        )
    except ImportError as error:
        raise ValueError(
            "linear_cross_entropy: impl='liger' needs the extra 'fast' (liger-kernel), which is not installed; "
            f"install it with {install_command('tokenmix-core[fast]')}, or use impl='torch'"
        ) from error
    # Any, because liger's annotation also covers results of other options
    summed: Any = liger_fused_linear_cross_entropy(hidden, weight, labels, ignore_index=ignore_index, reduction="sum")
    return summed
