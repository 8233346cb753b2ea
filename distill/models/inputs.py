"""Selection of a model's inputs from a batch."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from distill.models.packed_inputs import packed_inputs

INPUTS = ("input_ids", "attention_mask", "token_type_ids")


def inputs_of(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the model inputs of an unpacked batch, for any model."""
    return {name: batch[name] for name in INPUTS if name in batch}


def model_inputs(model: PreTrainedModel, batch: Mapping[str, Tensor]) -> dict[str, Any]:
    """Returns the inputs of a batch, packed or not, for this model.

    Raises:
        InputError: The batch is packed, and the documents of a row can't be separated in this model.
    """
    return packed_inputs(model, batch) if "documents" in batch else inputs_of(batch)
