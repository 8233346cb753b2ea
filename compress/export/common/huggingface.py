"""Export of stock Hugging Face checkpoints: safetensors, config, tokenizer."""

from pathlib import Path

import numpy as np
import torch
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from distill.checkpoint.custom_models import load_model_folder, save_model_folder
from distill.checkpoint.outputs import read_logits

WEIGHTS = "model.safetensors"


def export_huggingface(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Writes model and tokenizer so that `from_pretrained(folder)` of the stock class loads them.

    A pruned model that no stock class can express is saved with its modelling code.
    """
    save_model_folder(model, folder)
    tokenizer.save_pretrained(folder)


def input_names(config: PretrainedConfig) -> list[str]:
    """Returns the input names of an encoder; token types only if the model has more than one."""
    typed = getattr(config, "type_vocab_size", 0) > 1
    return ["input_ids", "attention_mask", *(["token_type_ids"] if typed else [])]


class TorchModel:
    """Checkpoint in PyTorch's eager mode, with the interface of the other runtimes: arrays in, logits out."""

    def __init__(self, folder: Path, auto_class: str = ""):
        model = load_model_folder(folder, auto_class)
        self.model = model if model.dtype == torch.float32 else model.float()  # a torchao model raises on .float()
        self.names = input_names(self.model.config)

    @classmethod
    def of(cls, model: PreTrainedModel) -> "TorchModel":
        """Returns a runner for a model in memory, which is put in eval mode."""
        runner = cls.__new__(cls)
        runner.model, runner.names = model.eval(), input_names(model.config)
        return runner

    @torch.inference_mode()
    def __call__(self, inputs: dict[str, np.ndarray]) -> np.ndarray:
        """Returns the logits of a padded batch of ids, mask and types, each [batch, length] int64.

        Their shape is [batch, classes], [batch, length, classes], or for spans [batch, length, 2].
        """
        return read_logits(self.model(**{name: torch.from_numpy(inputs[name]) for name in self.names})).numpy()
