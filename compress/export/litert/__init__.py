"""Export to LiteRT files for XNNPACK."""
