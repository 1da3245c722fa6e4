"""The arena trains and measures every mixer of the workspace under one rule; see `README.md`."""
