"""Training: recipes, rows in a fixed order, the Trainer, checkpoints that resume exactly, callbacks."""
