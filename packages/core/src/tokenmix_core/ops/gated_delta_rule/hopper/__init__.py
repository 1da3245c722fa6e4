"""Steps of the gated delta rule on Hopper for 16-bit inputs, in Gluon, which is part of Triton.

Triton's own forms of these steps pass tiles through registers on their way to shared memory and change layouts there;
they spill, and wait at every such place. Here tiles go straight to shared memory while products run, and computed
matrices stay in registers as left operands of the next product.
"""

from torch import Tensor

from tokenmix_core.chunking import cdiv
from tokenmix_core.ops.common import on_hopper

# multiprocessors, each of which has room for one program of a step that walks along chunks with all work of theirs
_ROUND = 132
# programs a round; fewer leave so many idle that two steps are quicker, the second of which takes all chunks at once
_LEAST = 96


def takes(x: Tensor, *others: Tensor) -> bool:
    """Whether these steps exist for tensors `[B, T, H, D]` of one dtype that they read by rows."""
    D = x.shape[-1]
    sizes = x.element_size() == 2 and D in (64, 128) and all(y.shape[-1] == D for y in others)
    return sizes and on_hopper(x.device) and all(y.data_ptr() % 16 == 0 for y in (x, *others))


def takes_heads(*tensors: Tensor) -> bool:
    """Whether the steps for heads of any size exist, those of K and V alike or not."""
    sizes = all(x.element_size() == 2 and x.shape[-1] in (64, 128, 256) for x in tensors)
    return sizes and on_hopper(tensors[0].device) and all(x.data_ptr() % 16 == 0 for x in tensors)


def gradients_at_once(q: Tensor, k: Tensor, do: Tensor, *, qk_l2norm: bool, programs: int) -> bool:
    """Whether one step makes all gradients: of normalised heads of 128, where its programs keep a GPU busy."""
    busy = programs >= _LEAST * cdiv(programs, _ROUND)
    return qk_l2norm and q.shape[-1] == 128 and busy and takes(q, k, do)
