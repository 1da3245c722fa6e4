"""Cross-entropy of a linear layer's outputs, a block of tokens at a time: the whole `[tokens, vocab]` never exists."""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from tokenmix_core.nn.dtypes import at_least_float32, gives_float32
from tokenmix_core.ops.common import refuse_graph

IGNORE = -100
# tokens a block: with 50,000 words their bfloat16 logits take 200 MB
BLOCK = 2048
# rows of logits have a multiple of so many words: where they begin at any byte, products on a GPU are slow
_WHOLE = 64
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
    r"""The sum over tokens of −log softmax(weight · hidden)[label], float32 (float64 for float64 inputs).

    .. math:: L = \sum_{t:\, y_t \ne \text{ignore}} \Big(\log \sum_w e^{W_w \cdot h_t} - W_{y_t} \cdot h_t\Big)

    Gradients of hidden and weight are computed together with the loss, block by block, and kept instead of logits; that
    of the weight is summed in float32. Under autocast the products run in autocast's dtype.

    Args:
        hidden: `[tokens, D]`.
        weight: `[vocab, D]`.
        labels: `[tokens]` int64; tokens with the label `ignore_index` count nothing.
        block_size: tokens whose logits exist at one time.
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
    fused = impl == "triton" or (impl is None and device == "cuda" and hidden.dtype != torch.float64)
    with torch.autocast(device, enabled=False):
        return _LinearCrossEntropy.apply(hidden, weight, labels, ignore_index, block_size, fused)


def at_least_one(items: Tensor | int) -> Tensor | int:
    """The divisor of a sum over so many predicted tokens: where there are none the loss is zero, not NaN."""
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
    """−log softmax(weight · hidden)[label] of each token, zero where the label is `ignore_index`; without gradients."""
    words, weight = len(weight), _whole(weight, hidden.dtype)
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
        refuse_graph()
        d_hidden, d_weight = ctx.saved_tensors
        d_hidden = (d_hidden * grad).to(d_hidden.dtype) if ctx.needs_input_grad[0] else None
        d_weight = (d_weight * grad).to(ctx.weight_dtype) if ctx.needs_input_grad[1] else None
        return d_hidden, d_weight, None, None, None, None


# an opaque operator: torch.compile keeps the loop over blocks as one node
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
    words, w = len(weight), _whole(weight, hidden.dtype)
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
            _add_product(d_weight, logits.T, h)
    return loss, d_hidden, d_weight[:words]


def _whole(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight in `dtype`, with rows of zeros after its own up to a multiple of `_WHOLE`."""
    spare = -len(weight) % _WHOLE
    weight = weight.to(dtype)
    return F.pad(weight, (0, 0, 0, spare)) if spare else weight


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a b: in one product where a device's products of 16 bits can add to float32."""
    if total.dtype == torch.float32 and gives_float32(a):
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total += a @ b


def _eager_gradient_(logits: Tensor, words: int, labels: Tensor, ignore_index: int, wanted: bool) -> Tensor:
    """The summed loss of a block of logits; if their gradient is wanted, it takes their place, zero past the words."""
    counts = (labels != ignore_index).unsqueeze(1)
    target = labels.unsqueeze(1).masked_fill(~counts, 0)
    wide = at_least_float32(logits[:, :words])
    lse = wide.logsumexp(1, keepdim=True)
    loss = ((lse - wide.gather(1, target)) * counts).sum()
    if wanted:
        # softmax − onehot; where the logits are wide already, in their own place
        wide.sub_(lse).exp_().mul_(counts)
        wide.scatter_add_(1, target, -counts.to(wide.dtype))
        logits[:, :words] = wide
        logits[:, words:] = 0
    return loss


def _fused_gradient_(logits: Tensor, words: int, labels: Tensor, ignore_index: int, wanted: bool) -> Tensor:
    """As `_eager_gradient_`, in one kernel."""
    from tokenmix_core.nn.loss_kernel import softmax_gradient_

    losses = torch.empty(len(labels), dtype=torch.float32, device=logits.device)
    # kernels are launched on the current device, which need not be that of the tensors
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
    """Room for both gradients, empty for one that nobody asks for; the weight's is wide, `dtype` its parameter's."""
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
            "install tokenmix-core[fast] or use impl='torch'"
        ) from error
    # its annotation has what it returns with further options, too
    summed: Any = liger_fused_linear_cross_entropy(hidden, weight, labels, ignore_index=ignore_index, reduction="sum")
    return summed
