"""Smaller models from the weights that stay, and the checkpoints that hold them."""
