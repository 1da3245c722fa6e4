"""The arena, which trains and measures every token mixer of this repository by the same rules; see `README.md`."""
