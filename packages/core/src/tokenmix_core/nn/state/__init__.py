"""States that mixers keep between calls, and the token layout of a call.

A layer's `LayerState` has named parts, each with the batch as its first dimension: `TensorState` is one tensor of
constant size (a recurrent state, the last inputs of a convolution), `KVState` holds the keys and values of all tokens
or of a window. The number of tokens differs by head in `RaggedKVState`, in slots of a fixed number, and in
`PagedKVState`, in pages that heads take as they need them. Sequences are stored without padding, each from its own
position 0 on, so that batches of unequal lengths need no masks.
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
from tokenmix_core.nn.state.ragged_kv import RaggedKVState as RaggedKVState
from tokenmix_core.nn.state.ragged_kv import first_taken as first_taken
