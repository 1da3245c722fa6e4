"""The sum of three branches' outputs, weighted by one gate per branch and head."""
