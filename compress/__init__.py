"""Big to small: precision, export and the measurement of what came out."""
