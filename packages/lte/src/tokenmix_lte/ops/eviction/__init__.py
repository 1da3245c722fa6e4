"""A token comes, one leaves the window, and of the far ones the worst makes room."""
