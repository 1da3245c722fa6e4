"""The gates of the gated delta rule and of SSD, from their projections."""
