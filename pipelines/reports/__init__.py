"""Reports: numbers, charts, the page, the model card, the terminal's tables."""
