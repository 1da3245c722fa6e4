"""The arena trains and measures every token mixer of this repository under the same rules; see `README.md`."""
