"""Cleaning of texts and rows: repairs of single texts, spelling, filters, duplicates and doubtful labels."""
