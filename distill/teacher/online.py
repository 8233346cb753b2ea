"""A teacher in memory, asked batch by batch."""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from distill.teacher.load import frozen

INPUTS = ("input_ids", "attention_mask", "token_type_ids")


class OnlineTeacher:
    """Answers with logits and, where asked, hidden states.

    It is no submodule of anything: optimizers, checkpoints and gradient synchronisation must not see it.
    """

    def __init__(self, model: PreTrainedModel, *, hidden: bool = False):
        self.model, self.hidden = frozen(model), hidden

    @torch.no_grad()
    def __call__(self, batch: dict[str, Tensor]) -> dict[str, Tensor | tuple[Tensor, ...]]:
        """Signals of a padded batch: logits [batch, classes], hidden (layers + 1) x [batch, length, width]."""
        inputs = {name: batch[name] for name in INPUTS if name in batch}
        if self.model.device != batch["input_ids"].device:
            self.model.to(batch["input_ids"].device)  # type: ignore[arg-type]
        out = self.model(**inputs, output_hidden_states=self.hidden)
        return {"logits": out.logits} | ({"hidden": out.hidden_states} if self.hidden else {})
