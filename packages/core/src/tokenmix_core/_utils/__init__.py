"""Private helpers of core."""
