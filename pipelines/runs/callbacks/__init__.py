"""Lightning callbacks of every training: early stopping, progress on the console, and a seed for each batch."""
