"""ExecuTorch programs for XNNPACK."""
