"""A teacher in memory that computes signals batch by batch."""

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
from distill.models.output_head import restrict_logits
from distill.models.sentence_encoder import PooledModel
from distill.teacher.fingerprint import frozen

TEACHER_INPUTS = (*INPUTS, "positions", "position_ids", "documents")  # fields of a batch that determine the outputs
ANSWERS = ("logits", "hidden", "relations", "embedding", "generated")


class OnlineTeacher:
    """A teacher that computes the requested tensors among logits, hidden, relations, embedding and generated.

    It is no submodule of any module, because optimizers, checkpoints and gradient synchronization must not see it.

    Args:
        model: The teacher; it is frozen here.
        answers: Names of the requested tensors.
        new_tokens: Maximum length of a generated sequence.
        temperature: Temperature of the generation; 0 decodes greedily.
        seed: Seed of the generation; each prompt has its own random stream, independent of its batch.
        device: Device to which batches are moved, with the teacher already on it; if left out, the teacher is moved to
            the device of the batch.
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
            attention_maps(model)  # raises if the model has none
        self.device = device

    @torch.no_grad()
    def __call__(self, batch: Mapping[str, Tensor]) -> dict[str, Any]:
        """Computes the requested tensors of a padded batch.

        Returns:
            logits [batch, classes] or [batch, length, classes], or [positions, vocabulary], sample by sample, if only
                some
            `positions` of a vocabulary are requested; hidden (layers + 1) x [batch, length, width]; relations layers x
                (query,
            key, value), each [batch, length, width]; embedding [batch, width], the output of a sentence encoder, or for
                any
            other model the mean of the last layer over the tokens; generated (ids, log-probabilities), each with a
                [tokens]
            tensor per sample.
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
        words = restrict_logits(self.model, batch) if "positions" in batch else nullcontext()
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
        """Continues each prompt up to and including the end token, or for `new_tokens`."""
        prompts = [ids[mask] for ids, mask in zip(batch["input_ids"], batch["attention_mask"].bool(), strict=True)]
        settings = {"new_tokens": self.new_tokens, "temperature": self.temperature, "seed": self.seed}
        return generate(self.model, prompts, **settings).rows()  # type: ignore[arg-type]
