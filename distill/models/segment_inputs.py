"""Model inputs of a segment of rows whose other positions are on other processes."""

import inspect
from collections.abc import Mapping

from torch import Tensor
from transformers import PreTrainedModel

from distill.data.batches.segments import ROW_DOCUMENTS, ROW_MASK
from distill.errors import InputError
from distill.models.packed_inputs import ModelInputs, build_packed_inputs, find_first_position


def build_segment_inputs(model: PreTrainedModel, batch: Mapping[str, Tensor]) -> ModelInputs:
    """Returns the inputs of a batch from `cut_segment`: the segment's tokens and their positions, a mask of whole rows.

    Args:
        model: A model whose attention exchanges heads for positions, see `distill.parallel.ulysses_attention`.
        batch: The segment.

    Raises:
        InputError: The model numbers positions itself, or as in `build_packed_inputs`.
    """
    if ROW_DOCUMENTS in batch:
        return build_packed_inputs(model, batch, batch[ROW_DOCUMENTS])
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise InputError(
            f"layout cp: {type(model).__name__}: expected a model that takes position_ids, found one that numbers the "
            "tokens it gets from 0: every segment of a text would begin like its first one; use fsdp=N"
        )
    inputs: ModelInputs = {name: batch[name] for name in ("input_ids", "token_type_ids") if name in batch}
    inputs["position_ids"] = batch["position_ids"] + find_first_position(model)
    return inputs | {"attention_mask": batch[ROW_MASK]}
