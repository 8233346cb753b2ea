"""The kinds of training step: plain, across tokenizers, fused, on-policy, progressive."""
