"""A model's logits for a whole split."""

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from distill.data.batches import EvalBatches
from distill.data.encode import Encoded
from distill.inputs import inputs_of

ROWS = 64  # a batch


@torch.no_grad()
def split_logits(model: PreTrainedModel, split: Encoded, pad_id: int) -> Tensor:
    """[texts, classes], in the order of the split; the model is left in eval mode."""
    model.eval()
    batches = EvalBatches(split, ROWS, pad_id)
    found = torch.cat([model(**inputs_of(batch)).logits for batch in batches])
    logits = torch.empty_like(found)
    logits[torch.as_tensor(np.concatenate(batches.order))] = found
    return logits


def accuracy(logits: Tensor, labels: Tensor) -> float:
    """Share of the texts that get their class."""
    return float((logits.argmax(-1) == labels).float().mean())
