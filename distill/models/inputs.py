"""Selection of a model's inputs from a batch."""

from collections.abc import Mapping
from inspect import signature
from typing import cast

from torch import Tensor, nn
from transformers import PreTrainedModel

from distill.data.batches.segments import ROW_DOCUMENTS, ROW_MASK
from distill.models.context import Context
from distill.models.packed_inputs import ModelInputs, build_packed_inputs
from distill.models.segment_inputs import build_segment_inputs

INPUT_NAMES = ("input_ids", "attention_mask", "token_type_ids")
# Fields of a batch that determine the outputs.
OUTPUT_FIELDS = (*INPUT_NAMES, "positions", "position_ids", "documents", ROW_MASK, ROW_DOCUMENTS)


def select_inputs(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the model inputs of an unpacked batch, for any model."""
    return {name: batch[name] for name in INPUT_NAMES if name in batch}


def build_inputs(model: PreTrainedModel, batch: Mapping[str, Tensor]) -> ModelInputs:
    """Returns the inputs of a batch for this model: packed, a segment, later tokens with their `context`, or neither.

    Raises:
        InputError: The batch is packed, and the documents of a row can't be separated in this model.
    """
    if "context" in batch:
        return cast(Context, batch["context"]).add_inputs(model, select_inputs(batch))
    if ROW_MASK in batch:
        return build_segment_inputs(model, batch)
    return build_packed_inputs(model, batch) if "documents" in batch else dict(select_inputs(batch))


def forgo_cache(model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, bool]:
    """Returns the setting with which a model keeps no keys and values for later tokens, as it does by default.

    Layers that are computed again, by activation checkpointing, would add theirs a second time. Empty for models that
    keep none, and for batches with a `context`, which keeps them itself.
    """
    keeps = "context" not in batch and "use_cache" in signature(model.forward).parameters
    return {"use_cache": False} if keeps else {}
