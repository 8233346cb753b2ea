"""LiteRT files for XNNPACK."""
