"""The choice between kernels in Gluon and portable ones, which make all other calls that kernels take."""

from __future__ import annotations

from torch import Tensor

from tokenmix_core.ops.dispatch import GluonForm
from tokenmix_core.ops.softmax_attention.plan import unreadable

GLUON = GluonForm(
    "attention over kept keys", "tokenmix_core.ops.sparse_attention.hopper", slower="about 1.2 to 1.3 times slower"
)


def limit(q: Tensor, k: Tensor, v: Tensor, until: Tensor | None) -> str | None:
    """Why kernels in Gluon cannot take such a call; None where they can."""
    K, V = q.shape[3], v.shape[3]
    if K not in (64, 128) or V not in (64, 128):
        return f"takes K and V of 64 or 128, got K={K} and V={V}"
    if until is not None:
        return "takes no until"
    return unreadable(q, k, v)


def takes_gluon(impl: str | None, q: Tensor, k: Tensor, v: Tensor, until: Tensor | None) -> bool:
    """Tell whether kernels in Gluon make a call. Keys of 128 were not yet measured: they wait to be asked for.

    Raises:
        ValueError: they are asked for and do not run.
        NotCompiled: they are asked for and did not compile.
    """
    asked = impl == "gluon" or q.shape[3] == 64
    return asked and GLUON.runs(impl, q.device, q.dtype, limit(q, k, v, until), "kept_attention")
