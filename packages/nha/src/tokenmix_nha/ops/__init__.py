"""Public operations: slot-window attention, the forget gates, and gated linear attention."""

# this import registers the operations with `explain`
import tokenmix_nha.ops.registry  # noqa: F401
from tokenmix_nha.ops.forget_gates.api import log_forget_gates
from tokenmix_nha.ops.gla.api import chunk_gla
from tokenmix_nha.ops.slot_window.api import (
    slot_window_attention,
    slot_window_attention_prefill,
    slot_window_attention_step,
)
from tokenmix_nha.ops.slot_window.state import SlotWindowState

__all__ = [
    "SlotWindowState",
    "chunk_gla",
    "log_forget_gates",
    "slot_window_attention",
    "slot_window_attention_prefill",
    "slot_window_attention_step",
]
