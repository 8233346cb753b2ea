"""Train, validation and test: labels, rows held out, overlap, and what reading them found."""
