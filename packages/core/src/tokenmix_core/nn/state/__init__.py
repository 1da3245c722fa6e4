"""States that mixers keep between calls, and the token layout of a call.

The state of a layer, `LayerState`, has named parts whose tensors have the batch as first dimension. `TensorState` is
one tensor of constant size (a recurrent state, or the last inputs of a convolution). `KVState` holds the keys and
values of all tokens or of a window. In two further classes each head holds a different number of tokens:
`RaggedKVState` has a fixed number of slots per head, and in `PagedKVState` a head takes another page when it needs one.
States contain no padding, and each sequence counts positions from its own first token, so decoding steps need no masks,
even if sequences have unequal lengths.
"""

from tokenmix_core.nn.state.kv_cache import KVState as KVState
from tokenmix_core.nn.state.layout import Span as Span
from tokenmix_core.nn.state.paged_kv import PagedKVState as PagedKVState
from tokenmix_core.nn.state.paged_kv import Pages as Pages
from tokenmix_core.nn.state.parts import Bounds as Bounds
from tokenmix_core.nn.state.parts import LayerState as LayerState
from tokenmix_core.nn.state.parts import StatePart as StatePart
from tokenmix_core.nn.state.parts import TensorState as TensorState
from tokenmix_core.nn.state.parts import copy_all as copy_all
from tokenmix_core.nn.state.parts import map_all as map_all
from tokenmix_core.nn.state.ragged_kv import RaggedKVState as RaggedKVState
from tokenmix_core.nn.state.ragged_kv import first_taken as first_taken
