"""The frozen teacher and what it says about each text."""
