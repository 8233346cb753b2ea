"""Training of a student: the Lightning module, its optimizer, and the layer terms."""
