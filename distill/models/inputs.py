"""What a model reads of a batch."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from distill.models.packed_inputs import packed_inputs

INPUTS = ("input_ids", "attention_mask", "token_type_ids")


def inputs_of(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Of an ordinary batch, whatever the model."""
    return {name: batch[name] for name in INPUTS if name in batch}


def model_inputs(model: PreTrainedModel, batch: Mapping[str, Tensor]) -> dict[str, Any]:
    """Of a batch, packed or not, for this model.

    Raises:
        InputError: A packed batch, and a model in which documents of a row can't be kept apart.
    """
    return packed_inputs(model, batch) if "documents" in batch else inputs_of(batch)
