"""Head counts and sizes, and the padding or splitting of heads to the sizes that kernels support."""

from __future__ import annotations

import torch.nn.functional as F
from jaxtyping import Float, Shaped
from torch import Tensor

from tokenmix_core.chunking import cdiv


def attention_heads(
    name: str, hidden_size: int, num_heads: int, num_kv_heads: int | None, head_dim: int | None
) -> tuple[int, int]:
    """Return the number of key-value heads (default: the query heads) and the head size (default: D / query heads).

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
    """Fit the heads of a linear recurrence to the sizes that a kernel supports, without changing the result.

    A key size K between two sizes is padded with zeros, which do not change the scores. Columns of the state do
    not interact, so a value head of size V is split into equal heads of the largest supported size that divides V, each
    with the gates of the original head; if no size divides V, it is padded.

    Args:
        key_size: K.
        value_size: V.
        sizes: head sizes that the kernel supports, ascending.

    Raises:
        ValueError: a key size above the largest.
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
        """Return the shape of the recurrent state of `heads` value heads, without the batch."""
        return heads * self.parts, self.kernel_key_size, self.kernel_value_size

    def keys(self, x: Float[Tensor, "B T H K"]) -> Tensor:
        """Pad the channels of q or k."""
        return _pad(x, self.kernel_key_size)

    def values(self, x: Float[Tensor, "B T HV V"]) -> Tensor:
        """Pad and split the heads of v."""
        x = _pad(x, self.parts * self.kernel_value_size)
        return x if self.parts == 1 else x.unflatten(-1, (self.parts, -1)).flatten(-3, -2)

    def gates(self, x: Shaped[Tensor, "*tokens HV"]) -> Shaped[Tensor, "*tokens parts_HV"]:
        """Repeat per-head values, such as gates, once for each of the heads that `values` splits a head into."""
        return x if self.parts == 1 else x.repeat_interleave(self.parts, -1)

    def outputs(self, x: Float[Tensor, "B T parts_HV size"], heads: int) -> Float[Tensor, "B T HV V"]:
        """Invert `values` for the outputs of `heads` value heads."""
        x = x if self.parts == 1 else x.unflatten(-2, (heads, self.parts)).flatten(-2)
        return x if x.shape[-1] == self.value_size else x[..., : self.value_size]

    def states(self, x: Float[Tensor, "N HV K V"]) -> Tensor:
        """Pad and split the recurrent states of the original heads to the shape of `state_shape`."""
        if x.shape[-2] != self.kernel_key_size:
            x = F.pad(x, (0, 0, 0, self.kernel_key_size - x.shape[-2]))
        return self.values(x.transpose(1, 2)).transpose(1, 2).contiguous()

    def whole_states(self, x: Float[Tensor, "N parts_HV K V"], heads: int) -> Float[Tensor, "N HV K V"]:
        """Invert `states` for `heads` value heads."""
        x = x if x.shape[-2] == self.key_size else x[..., : self.key_size, :]
        return self.outputs(x.transpose(1, 2), heads).transpose(1, 2)


def _pad(x: Tensor, size: int) -> Tensor:
    return x if x.shape[-1] == size else F.pad(x, (0, size - x.shape[-1]))
