"""The paper's operation: `slot_window_attention`, and one token of it for decoding."""

from tokenmix_nha.ops.slot_window_attention.api import slot_window_attention, slot_window_attention_step
from tokenmix_nha.ops.slot_window_attention.state import SlotWindowState

__all__ = ["SlotWindowState", "slot_window_attention", "slot_window_attention_step"]
