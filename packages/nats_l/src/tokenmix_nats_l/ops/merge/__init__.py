"""The merge of two operations' outputs: norm, weighted sum and gate."""
