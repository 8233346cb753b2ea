"""Export of a model's graph, without computing any values."""

import logging
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from distill.errors import InputError


class ListedOutputs(nn.Module):
    """A wrapper that returns all tensor outputs of a model as a list, which torch.export supports."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: dict[str, Tensor]) -> list[Tensor]:
        """Returns the tensors among the model's outputs for `inputs`."""
        cache = {"use_cache": False} if hasattr(self.model.config, "use_cache") else {}
        outputs = self.model(**inputs, return_dict=True, **cache)
        return [value for value in outputs.values() if isinstance(value, Tensor)]


def export_graph(model: PreTrainedModel, example: Mapping[str, Tensor] | None = None) -> torch.export.ExportedProgram:
    """Exports the model's graph; the model is left unchanged.

    Args:
        model: The model, on any device, including meta.
        example: Inputs by name, [batch, length]; by default two rows of seven ids, for multiple choice of two choices
            and with their mask, from which ModernBERT takes the number of texts.

    Raises:
        InputError: torch.export can't follow the model's code.
    """
    inputs = dict(example or build_example(model))
    inputs = {name: tensor.to(model.device) for name, tensor in inputs.items()}
    implementation = model.config._attn_implementation
    logger = logging.getLogger("torch.export")
    level = logger.level
    try:
        logger.setLevel(logging.ERROR)
        if implementation not in ("eager", "sdpa"):
            model.config._attn_implementation = "sdpa"  # flash kernels can't be exported; the weights are the same
        with torch.no_grad():
            return torch.export.export(ListedOutputs(model), (inputs,), strict=False)
    except Exception as error:  # any error of the model's own code, or of the exporter
        raise InputError(
            f"{model.config.model_type}: {type(model).__name__} could not be traced with the inputs {sorted(inputs)}, "
            f"so that its coupled weights are unknown: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        ) from error
    finally:
        logger.setLevel(level)
        model.config._attn_implementation = implementation


def build_example(model: PreTrainedModel) -> dict[str, Tensor]:
    """Returns inputs that every model of this class accepts."""
    if not type(model).__name__.endswith("ForMultipleChoice"):
        return {"input_ids": torch.ones((2, 7), dtype=torch.int64)}
    return dict.fromkeys(("input_ids", "attention_mask"), torch.ones((2, 2, 7), dtype=torch.int64))
