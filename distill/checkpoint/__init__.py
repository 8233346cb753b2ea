"""Checkpoints as they come in: folder, config, weights and tokenizer, each checked before anything is built on it.

`folder`, `config` and `headers` import no torch.
"""
