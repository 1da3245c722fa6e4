"""The sum of three branches' outputs, weighted by gates of each head."""
