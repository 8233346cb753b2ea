"""Selection of a model's inputs from a batch."""

from collections.abc import Mapping
from typing import cast

from torch import Tensor
from transformers import PreTrainedModel

from distill.models.context import Context
from distill.models.packed_inputs import ModelInputs, build_packed_inputs

INPUT_NAMES = ("input_ids", "attention_mask", "token_type_ids")
OUTPUT_FIELDS = (*INPUT_NAMES, "positions", "position_ids", "documents")  # fields of a batch that determine the outputs


def select_inputs(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the model inputs of an unpacked batch, for any model."""
    return {name: batch[name] for name in INPUT_NAMES if name in batch}


def build_inputs(model: PreTrainedModel, batch: Mapping[str, Tensor]) -> ModelInputs:
    """Returns the inputs of a batch for this model: packed, later tokens of texts with their `context`, or neither.

    Raises:
        InputError: The batch is packed, and the documents of a row can't be separated in this model.
    """
    if "context" in batch:
        return cast(Context, batch["context"]).add_inputs(model, select_inputs(batch))
    return build_packed_inputs(model, batch) if "documents" in batch else dict(select_inputs(batch))
