"""Rotary position embedding of heads, fused with their RMS norm and, in decoding, with the write to the KV cache."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from tokenmix_core.kernels.launch.cache.replay import Checked
from tokenmix_core.ops.checks import bind_shapes, check_dtype, check_same_dtype, check_tensors
from tokenmix_core.ops.dispatch import row_impl
from tokenmix_core.ops.types import Impl

_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def rotate_reference(x: Tensor, cos: Tensor, sin: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Normalise the heads (RMSNorm) if `weight` is given, then rotate them in at least float32, in eager PyTorch."""
    if weight is not None:
        x = F.rms_norm(x, weight.shape, weight.to(x.dtype), eps)
    cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
    a, b = (x if x.dtype == torch.float64 else x.float()).chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


def rotate_step_reference(
    q: Tensor, k: Tensor, v: Tensor | None, q_weight: Tensor | None, k_weight: Tensor | None, cos: Tensor | None,
    sin: Tensor | None, keys: Tensor, values: Tensor | None, positions: Tensor | None, eps: float,
) -> Tensor:  # fmt: skip
    """Return q, normalised if it has a weight, rotated if angles are given; store k, changed alike, and v in the cache.

    All operations are PyTorch's.
    """

    def rotated(x: Tensor, weight: Tensor | None) -> Tensor:
        if cos is not None and sin is not None:
            return rotate_reference(x.unsqueeze(1), cos.unsqueeze(1), sin.unsqueeze(1), weight, eps).squeeze(1)
        return x if weight is None else F.rms_norm(x, weight.shape, weight.to(x.dtype), eps)

    rows = torch.arange(len(q), device=q.device)
    at = rows, torch.zeros_like(rows) if positions is None else positions
    keys.index_put_(at, rotated(k, k_weight))
    if v is not None and values is not None:
        values.index_put_(at, v)
    return rotated(q, q_weight)


def rotate(
    x: Float[Tensor, "B T H K"],
    cos: Float[Tensor, "B_or_1 T K_over_2"],
    sin: Float[Tensor, "B_or_1 T K_over_2"],
    weight: Float[Tensor, "K"] | None = None,
    *,
    eps: float = 1e-6,
    impl: Impl | None = None,
) -> Float[Tensor, "B T H K"]:
    """Rotate channels i and i + K/2 of every head by the i-th angle of its token, after an RMS norm of the head.

    Computed in float32 (float64 for float64), returned in x's dtype; differentiable in x and weight.

    Args:
        x: `[B, T, H, K]`, K even.
        cos, sin: cosines and sines of the angles, float32 `[B or 1, T, K / 2]`.
        weight: weight of the norm; None for no norm.
        eps: added to the norm's mean square.
        impl: "triton", "reference" (any device), or None: Triton for CUDA tensors in eager mode except float64, else
            the reference, which torch.compile fuses with its neighbours.

    Raises:
        ValueError: shapes, dtypes or devices do not match.
    """
    op = "rotate"
    dims = bind_shapes(op, {}, x=(x, "B T H K"), weight=(weight, "K?"))
    check_dtype(op, _FLOATS, x=x, weight=weight)
    check_tensors(op, cos=cos, sin=sin)
    dims |= _angles_of(op, dims, cos, x=x)
    bind_shapes(op, dims, x=(x, "B T H K"), cos=(cos, "R T half"), sin=(sin, "R T half"))
    if row_impl(op, impl, x) == "reference" or not x.numel():
        return rotate_reference(x, cos, sin, weight, eps)
    from tokenmix_core.ops.fused.rotary_kernels import rotate_triton

    return rotate_triton(x, weight, cos, sin, eps)


@torch.no_grad()
def rotate_step(
    q: Float[Tensor, "B HQ K"],
    k: Float[Tensor, "B H K"],
    v: Float[Tensor, "B H V"] | None,
    cos: Float[Tensor, "B_or_1 K_over_2"] | None,
    sin: Float[Tensor, "B_or_1 K_over_2"] | None,
    keys: Float[Tensor, "B S H K"],
    values: Float[Tensor, "B S H V"] | None,
    positions: Int[Tensor, "B"] | None,
    q_weight: Float[Tensor, "K"] | None = None,
    k_weight: Float[Tensor, "K"] | None = None,
    *,
    eps: float = 1e-6,
    impl: Impl | None = None,
) -> Float[Tensor, "B HQ K"]:
    """Rotate q and k of one token; store the rotated k, and v, in a cache; all in one launch. Not differentiable.

    Args:
        q, k, v: one token of each sequence; v and `values` may both be None.
        cos, sin: cosines and sines of the token's angles, float32; both are None for no rotation.
        keys, values: the cache, in q's dtype, with contiguous channels; overwritten at `positions`.
        positions: each sequence's position in the cache, int64 `[B]`, from 0 to S − 1 (not checked); None for 0.
        q_weight, k_weight: weights of the norms of q and k; None for no norm.
        eps: added to the norms' mean squares.
        impl: as for `rotate`.

    Returns:
        the rotated q.

    Raises:
        ValueError: shapes, dtypes or devices do not match.
    """
    given = q, k, v, q_weight, k_weight, cos, sin, keys, values, positions
    if _check_step(impl, *given) == "reference":
        return rotate_step_reference(*given, eps)
    from tokenmix_core.ops.fused.rotary_kernels import rotate_step_triton

    return rotate_step_triton(*given, eps)


@Checked
def _check_step(impl, q, k, v, q_weight, k_weight, cos, sin, keys, values, positions) -> str:
    """Validate a call; return the implementation."""
    op = "rotate_step"
    dims = bind_shapes(op, {}, q=(q, "B HQ K"), k=(k, "B H K"), v=(v, "B H V?"), q_weight=(q_weight, "K?"))
    check_dtype(op, _FLOATS, q=q, q_weight=q_weight, k_weight=k_weight)
    check_same_dtype(op, q=q, k=k, v=v, keys=keys, values=values)
    for (name, x), (other, y) in ((("cos", cos), ("sin", sin)), (("v", v), ("values", values))):
        if (x is None) != (y is None):
            raise ValueError(f"{op}: {name} and {other} go together, got only {other if x is None else name}")
    if cos is not None:
        check_tensors(op, cos=cos, sin=sin)
    dims |= _angles_of(op, dims, cos, q=q)
    bind_shapes(
        op, dims, q=(q, "B HQ K"), k_weight=(k_weight, "K?"), cos=(cos, "R half?"), sin=(sin, "R half?"),
        keys=(keys, "B S H K"), values=(values, "B S H V?"), positions=(positions, "B?"),
    )  # fmt: skip
    check_dtype(op, (torch.int64,), positions=positions)
    if not dims["S"]:
        raise ValueError(f"{op}: keys must have S ≥ 1, got {list(keys.shape)}")
    for name, x in (("keys", keys), ("values", values)):
        if x is not None and x.stride(3) != 1:
            raise ValueError(f"{op}: {name} must have contiguous channels, got strides {x.stride()}")
    return "reference" if not q.numel() else row_impl(op, impl, q)


def _angles_of(op: str, dims: dict[str, int], cos: Tensor | None, **rotated: Tensor) -> dict[str, int]:
    """Check that K is even and that `cos` has B rows or one; return sizes `R` (rows of cos) and `half` (K / 2).

    `rotated` is the tensor to rotate, under its name in the error message.
    """
    rows = 1 if cos is None else len(cos)
    if dims["K"] % 2 or rows not in (1, dims["B"]):
        ((name, x),) = rotated.items()
        raise ValueError(
            f"{op}: {name} must have an even K and cos B or 1 rows, got {list(x.shape)} and "
            f"{None if cos is None else list(cos.shape)}"
        )
    return {"R": rows, "half": dims["K"] // 2}
