"""The public function of the scorer: it checks arguments and selects the implementation."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tokenmix_core.kernels import Checked
from tokenmix_core.ops import (
    Impl,
    bind_shapes,
    by_reference,
    check_cu_seqlens,
    check_dtype,
    check_same_device,
    check_same_dtype,
    check_tensors,
    resolve_impl,
)
from tokenmix_lte.ops.scorer.plan import GLUON, hopper_limit
from tokenmix_lte.ops.scorer.reference import LEVELS, retention_logits_reference
from tokenmix_lte.ops.scorer.sizes import limit

_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def retention_logits(
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H V"],
    convs: Sequence[tuple[Float[Tensor, "H _out _in taps"], Float[Tensor, "H _out"]]],
    weight: Float[Tensor, "H C"],
    bias: Float[Tensor, "H"],
    *,
    offsets: Sequence[int] = (-2, 0, 2),
    begin: Int[Tensor, "B"] | None = None,
    cu_seqlens: Int[Tensor, "N_plus_1"] | None = None,
    dropout: float = 0.0,
    impl: Impl | None = None,
) -> Float[Tensor, "B T H"]:
    """Return a retention logit for each key: convolutions of [k; v] over time, each with SiLU, then a linear map.

    Each head has its own weights. A convolution reads its input at t + o for every offset o; tokens that do not exist
    or belong to another sequence are zero in the input of every layer, not only of the first. Differentiable in k, v
    and all weights. Computed in float32 (float64 for float64 inputs), even under autocast, because the sign of a logit
    decides whether its key is retained.

    Args:
        k, v: keys before any rotation, and values; both bfloat16, float16, float32 or float64.
        convs: weights and biases of each convolution; the input of the first has K + V channels.
        weight, bias: weights and bias of the linear map.
        offsets: for each tap of the convolutions, the offset of the token that it reads.
        begin: index of the first existing token in each row; None for 0. Logits before it have no meaning.
        cu_seqlens: boundaries of packed sequences, for B = 1 and without `begin`.
        dropout: probability that an element of a convolution's input is set to 0, rounded to a multiple of 2⁻¹⁵; other
            elements are divided by 1 − dropout. The mask is a hash of a random seed and the element's index, equal in
            all implementations.
        impl: "triton" (three convolutions; three offsets, 1 or 2 apart, with 0 among them; K = V, up to 64 channels, no
            float64), "gluon" (for Hopper: the same, but bfloat16 or float16, layers of 16, 32 or 64 channels, and at
            most 32 in the second layer if keys and the first layer have 64), "reference" (any device), or None: for
            CUDA tensors the Gluon kernels or else the Triton kernels if they support the scorer, otherwise the
            reference. For k in bfloat16 or float16, the kernels' matmuls have operands of that dtype and float32 sums;
            all other computations are in float32.

    Returns:
        Logits `[B, T, H]`, float32 (float64 for float64 inputs).

    Raises:
        ValueError: a wrong shape, dtype, device or option.
    """
    check_tensors("retention_logits", k=k, v=v)
    # check devices before entering autocast: its error for an unsupported device would hide the mismatch
    check_same_device("retention_logits", k=k, v=v)
    with torch.autocast(k.device.type, enabled=False):
        chosen = _check(k, v, convs, weight, bias, tuple(offsets), begin, cu_seqlens, dropout, impl)
        # draw the seed on the device, so that the CPU need not wait for it
        threshold = min(round(dropout * LEVELS), LEVELS - 1)
        seed = torch.randint(1 << 31, (1,), device=k.device) if threshold else None
        options = dict(offsets=offsets, begin=begin, cu_seqlens=cu_seqlens, seed=seed, threshold=threshold)
        if chosen == "reference":
            return retention_logits_reference(k, v, convs, weight, bias, **options)
        from tokenmix_lte.ops.scorer.autograd import retention_logits_kernels

        return retention_logits_kernels(k, v, convs, weight, bias, **options, impl=chosen)


def _check(k, v, convs, weight, bias, offsets, begin, cu_seqlens, dropout, impl) -> str | None:
    """Validate a call; return the result of `resolve_impl`, or "reference" if `impl` is None and kernels do not fit."""
    flat = [x for conv in convs for x in conv]
    return _check_flat(k, v, weight, bias, offsets, begin, cu_seqlens, dropout, impl, *flat)


@Checked
def _check_flat(k, v, weight, bias, offsets, begin, cu_seqlens, dropout, impl, *flat) -> str | None:
    op, convs = "retention_logits", list(zip(flat[::2], flat[1::2], strict=True))
    dims = bind_shapes(op, {}, k=(k, "B T H K"), v=(v, "B T H V"), begin=(begin, "B?"))
    asked, impl = impl, resolve_impl(op, impl, k, GLUON)
    check_dtype(op, _FLOATS, k=k)
    check_same_dtype(op, k=k, v=v)
    check_dtype(op, (torch.int32, torch.int64), begin=begin)
    check_cu_seqlens(op, cu_seqlens, dims["B"], dims["T"])
    if begin is not None and cu_seqlens is not None:
        raise ValueError(f"{op}: begin and cu_seqlens exclude each other, got both")
    if not convs or not offsets:
        raise ValueError(f"{op}: expected at least one convolution and one offset, got {len(convs)} and {len(offsets)}")
    if not 0 <= dropout < 1:
        raise ValueError(f"{op}: dropout must be from 0 to below 1, got {dropout!r}")
    dims |= {"taps": len(offsets), "in": dims["K"] + dims["V"]}
    for i, (kernel, shift) in enumerate(convs):
        dims.pop("out", None)
        bind_shapes(op, dims, **{f"convs[{i}][0]": (kernel, "H out in taps"), f"convs[{i}][1]": (shift, "H out")})
        check_same_device(op, k=k, **{f"convs[{i}][0]": kernel, f"convs[{i}][1]": shift})
        check_dtype(op, _FLOATS, **{f"convs[{i}][0]": kernel, f"convs[{i}][1]": shift})
        dims["in"] = dims["out"]
    bind_shapes(op, dims, weight=(weight, "H in"), bias=(bias, "H"), k=(k, "B T H K"), cu_seqlens=(cu_seqlens, "_?"))
    check_dtype(op, _FLOATS, weight=weight, bias=bias)
    outs = [kernel.shape[1] for kernel, _ in convs]
    why = limit(dims["K"], dims["V"], outs, offsets, k.dtype)
    if impl == "gluon" and why is None:
        why = hopper_limit(dims["K"], outs)
    if impl == "reference" or why is None:
        return impl
    if asked is None:
        return by_reference(op, why, k.device.type, k.dtype)
    raise ValueError(f"{op}: impl={asked!r} {why}; pass impl='reference', or None for what runs here")
