"""Variants of the training step: across tokenizers, fused, on-policy, progressive; and checks of teacher signals."""
