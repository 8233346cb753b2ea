"""A stock Hugging Face checkpoint: safetensors, config, tokenizer."""

from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerBase

WEIGHTS = "model.safetensors"


def export_huggingface(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Writes model and tokenizer so that the stock classes' `from_pretrained(folder)` loads them."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


class TorchModel:
    """A checkpoint in PyTorch's eager mode, called like the other runtimes: arrays in, logits out."""

    def __init__(self, folder: Path, auto_class: str = "AutoModelForSequenceClassification"):
        loader = getattr(transformers, auto_class)
        self.model = loader.from_pretrained(folder, dtype=torch.float32, use_safetensors=True).eval()

    @torch.inference_mode()
    def __call__(self, inputs: dict[str, np.ndarray]) -> np.ndarray:
        """Logits [batch, classes] of a padded batch of ids, mask and types, each [batch, length] int64."""
        return self.model(**{name: torch.from_numpy(value) for name, value in inputs.items()}).logits.numpy()
