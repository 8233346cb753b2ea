"""Readers of tables and texts from files and the Hugging Face hub."""
