"""Training a student: the Lightning module, its optimizer, and the terms on layers."""
