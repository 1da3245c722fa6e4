"""Select Gluon or portable kernels for attention over retained keys."""

from __future__ import annotations

from torch import Tensor

from tokenmix_core.ops.dispatch import GluonForm
from tokenmix_core.ops.softmax_attention.plan import unreadable

GLUON = GluonForm(
    "attention over retained keys", "tokenmix_core.ops.sparse_attention.hopper", slower="about 1.2 to 1.3 times slower"
)


def limit(q: Tensor, k: Tensor, v: Tensor, until: Tensor | None) -> str | None:
    """Return why Gluon kernels do not support a call with these arguments; None if they do."""
    K, V = q.shape[3], v.shape[3]
    if K not in (64, 128) or V not in (64, 128):
        return f"takes K and V of 64 or 128, got K={K} and V={V}"
    if until is not None:
        return "takes no until"
    return unreadable(q, k, v)


def takes_gluon(impl: str | None, q: Tensor, k: Tensor, v: Tensor, until: Tensor | None) -> bool:
    """True if Gluon kernels run a call; with K = 128, which is not measured yet, only if `impl` is "gluon".

    Raises:
        ValueError: `impl` is "gluon" and Gluon kernels do not support the call.
        NotCompiled: `impl` is "gluon" and the Gluon kernels did not compile.
    """
    selected = impl == "gluon" or q.shape[3] == 64
    return selected and GLUON.runs(impl, q.device, q.dtype, limit(q, k, v, until), "kept_attention")
