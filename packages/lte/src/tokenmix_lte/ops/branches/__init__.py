"""The sum of three branches' outputs, each head's weighed by gates."""
