"""The launch cache: calls whose signature returns are captured once, then replayed."""
