"""Export to ExecuTorch programs for XNNPACK."""
