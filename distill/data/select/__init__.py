"""Choice of the rows that a student is trained on."""
