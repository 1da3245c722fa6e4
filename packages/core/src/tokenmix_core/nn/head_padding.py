"""Counts and sizes of heads, and padding or splitting of heads to the sizes that kernels support."""

from __future__ import annotations

import torch.nn.functional as F
from jaxtyping import Float, Shaped
from torch import Tensor

from tokenmix_core.chunking import cdiv


def attention_heads(
    name: str, hidden_size: int, num_heads: int, num_kv_heads: int | None, head_dim: int | None
) -> tuple[int, int]:
    """Return `num_kv_heads` (if None, `num_heads`) and `head_dim` (if None, `hidden_size` / `num_heads`).

    Raises:
        ValueError: head counts that do not divide; the message begins with `name`.
    """
    num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    if num_heads < 1 or num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(f"{name}: num_heads must be a multiple of num_kv_heads, got {num_heads} and {num_kv_heads}")
    if head_dim is None and hidden_size % num_heads:
        raise ValueError(
            f"{name}: without head_dim, num_heads must divide hidden_size, got {num_heads} and {hidden_size}"
        )
    return num_kv_heads, hidden_size // num_heads if head_dim is None else head_dim


class HeadFit:
    """Pad and split a linear recurrence's heads to sizes that its kernel supports, without changing the result.

    A key size K is padded with zeros, which do not change the scores, to the next supported size. The columns of the
    state do not interact, so a value head of size V is split into equal heads of the largest supported size that
    divides V, each with the gates of the original head. If no size divides V, the head is padded with zeros, and split
    if V exceeds the largest size.

    Args:
        key_size: K.
        value_size: V.
        sizes: head sizes that the kernel supports, ascending.

    Raises:
        ValueError: K is above the largest supported size.
    """

    def __init__(self, key_size: int, value_size: int, sizes: tuple[int, ...]):
        if key_size > sizes[-1]:
            raise ValueError(f"head sizes of keys go up to {sizes[-1]}, got {key_size}")
        self.key_size, self.value_size = key_size, value_size
        self.kernel_key_size = next(size for size in sizes if size >= key_size)
        divisors = [size for size in sizes if value_size % size == 0]
        if value_size in sizes or not divisors:
            self.parts = cdiv(value_size, sizes[-1])
            self.kernel_value_size = next(size for size in sizes if size * self.parts >= value_size)
        else:
            self.kernel_value_size = divisors[-1]
            self.parts = value_size // self.kernel_value_size

    def state_shape(self, heads: int) -> tuple[int, int, int]:
        """Return the shape of the recurrent state for `heads` original value heads, without the batch dimension."""
        return heads * self.parts, self.kernel_key_size, self.kernel_value_size

    def keys(self, x: Float[Tensor, "B T H K"]) -> Tensor:
        """Pad the channels of q or k with zeros to the supported size."""
        return _pad(x, self.kernel_key_size)

    def values(self, x: Float[Tensor, "B T HV V"]) -> Tensor:
        """Pad and split the heads of v to the supported size."""
        x = _pad(x, self.parts * self.kernel_value_size)
        return x if self.parts == 1 else x.unflatten(-1, (self.parts, -1)).flatten(-3, -2)

    def gates(self, x: Shaped[Tensor, "*tokens HV"]) -> Shaped[Tensor, "*tokens parts_HV"]:
        """Repeat each head's gates for all heads that `values` makes of this head."""
        return x if self.parts == 1 else x.repeat_interleave(self.parts, -1)

    def outputs(self, x: Float[Tensor, "B T parts_HV size"], heads: int) -> Float[Tensor, "B T HV V"]:
        """Undo `values`: return the outputs of the `heads` original value heads."""
        x = x if self.parts == 1 else x.unflatten(-2, (heads, self.parts)).flatten(-2)
        return x if x.shape[-1] == self.value_size else x[..., : self.value_size]

    def states(self, x: Float[Tensor, "N HV K V"]) -> Tensor:
        """Pad and split the recurrent states x of the original heads to the shape that `state_shape` returns."""
        if x.shape[-2] != self.kernel_key_size:
            x = F.pad(x, (0, 0, 0, self.kernel_key_size - x.shape[-2]))
        return self.values(x.transpose(1, 2)).transpose(1, 2).contiguous()

    def whole_states(self, x: Float[Tensor, "N parts_HV K V"], heads: int) -> Float[Tensor, "N HV K V"]:
        """Undo `states`: return the states of the `heads` original value heads."""
        x = x if x.shape[-2] == self.key_size else x[..., : self.key_size, :]
        return self.outputs(x.transpose(1, 2), heads).transpose(1, 2)


def _pad(x: Tensor, size: int) -> Tensor:
    return x if x.shape[-1] == size else F.pad(x, (0, size - x.shape[-1]))
