"""Reading and validation of input checkpoints: folder, config, weights and tokenizer.

`folder`, `config` and `headers` don't import torch.
"""
