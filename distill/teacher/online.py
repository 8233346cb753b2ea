"""A teacher in memory, asked batch by batch."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from distill.checkpoint.outputs import find_logits
from distill.errors import InputError
from distill.models.attention import Vectors, attention_maps, watching
from distill.models.generation import generate
from distill.models.inputs import INPUTS, model_inputs
from distill.models.output_head import asked_words
from distill.models.sentence_encoder import PooledModel
from distill.teacher.fingerprint import frozen

ASKED = (*INPUTS, "positions", "position_ids", "documents")  # of a batch, all that decides an answer
ANSWERS = ("logits", "hidden", "relations", "embedding", "generated")


class OnlineTeacher:
    """Answers with the tensors asked for, of: logits, hidden, relations, embedding, generated.

    It is no submodule of anything: optimizers, checkpoints and gradient synchronisation must not see it.

    Args:
        model: The teacher; frozen here.
        answers: Names of the tensors.
        new_tokens: Most tokens of a generated sequence.
        temperature: Of generation; 0 takes the likeliest token.
        seed: Of generation; each prompt has its own stream, whatever it is in a batch with.
        device: Batches are moved there, and the teacher is already set up for it; left out, it moves to where the batch
            is.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        answers: Sequence[str] = ("logits",),
        *,
        new_tokens: int = 64,
        temperature: float = 0.0,
        seed: int = 0,
        device: torch.device | None = None,
    ):
        unknown = [name for name in answers if name not in ANSWERS]
        if unknown:
            raise InputError(f"teacher: expected answers among {', '.join(ANSWERS)}, found {', '.join(unknown)}")
        self.model, self.answers = frozen(model), tuple(answers)
        self.new_tokens, self.temperature, self.seed = new_tokens, temperature, seed
        if "relations" in answers:
            attention_maps(model)  # raises where there are none
        self.device = device

    @torch.no_grad()
    def __call__(self, batch: Mapping[str, Tensor]) -> dict[str, Any]:
        """Answers about a padded batch.

        Returns:
            logits [batch, classes] or [batch, length, classes], of a vocabulary of which only some `positions` are
            asked about [positions, vocabulary], those of one sample after the other's; hidden (layers + 1) x
            [batch, length, width]; relations layers x (query, key, value), each [batch, length, width]; embedding
            [batch, width], what a sentence encoder answers, and of any other model the mean of the last layer over the
            tokens; generated (ids, log-probabilities), a [tokens] tensor a sample each.
        """
        device = self.device or batch["input_ids"].device
        batch = {name: value.to(device) for name, value in batch.items() if isinstance(value, Tensor)}
        if self.device is None and self.model.device != device:
            self.model.to(device)  # type: ignore[arg-type]
        out: dict[str, Any] = {}
        if set(self.answers) - {"generated"}:
            out = self.forward(batch)
        if "generated" in self.answers:
            out["generated"] = self.generate(batch)
        return out

    def forward(self, batch: Mapping[str, Tensor]) -> dict[str, Any]:
        deep = "hidden" in self.answers or "embedding" in self.answers
        asked = "relations" in self.answers
        watched: AbstractContextManager[list[Vectors]] = watching(self.model) if asked else nullcontext([])
        words = asked_words(self.model, batch) if "positions" in batch else nullcontext()
        with watched as caught, words:
            found = self.model(**model_inputs(self.model, batch), output_hidden_states=deep)
        said = find_logits(found)
        out: dict[str, Any] = {"logits": said} if said is not None else {}
        if "hidden" in self.answers:
            out["hidden"] = found.hidden_states
        if "embedding" in self.answers and isinstance(self.model, PooledModel):
            out["embedding"] = said
        elif "embedding" in self.answers:
            mask = batch["attention_mask"][..., None].to(found.hidden_states[-1].dtype)
            out["embedding"] = (found.hidden_states[-1] * mask).sum(1) / mask.sum(1)
        if "relations" in self.answers:
            out["relations"] = [tuple(layer) for layer in caught]
        return out

    def generate(self, batch: Mapping[str, Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Goes on after each prompt until the end token, which is kept, or `new_tokens`."""
        prompts = [ids[mask] for ids, mask in zip(batch["input_ids"], batch["attention_mask"].bool(), strict=True)]
        settings = {"new_tokens": self.new_tokens, "temperature": self.temperature, "seed": self.seed}
        return generate(self.model, prompts, **settings).rows()  # type: ignore[arg-type]
