"""A teacher in memory that computes signals batch by batch."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from transformers import PreTrainedModel

from distill.checkpoint.custom_models.modeling_token_vectors import TokenVectorsSentenceModel
from distill.checkpoint.outputs import find_logits, read_logits
from distill.errors import InputError
from distill.losses.teacher_signals import AttentionVectors, TeacherSignals
from distill.models.attention import capture_attention_vectors, find_attention_projections
from distill.models.generation import generate
from distill.models.inputs import build_inputs, forgo_cache
from distill.models.output_head import restrict_logits
from distill.models.sentence_encoder import PooledModel
from distill.teacher.fingerprint import freeze

OUTPUTS = ("logits", "hidden", "relations", "embedding", "generated")


class OnlineTeacher:
    """A teacher that computes the requested outputs among logits, hidden, relations, embedding and generated.

    It is no submodule of any module, because optimizers, checkpoints and gradient synchronization must not see it.

    Args:
        model: The teacher; it is frozen here.
        outputs: Names of the requested outputs.
        new_tokens: Maximum length of a generated sequence.
        temperature: Temperature of the generation; 0 decodes greedily.
        seed: Seed of the generation; each prompt has its own random stream, independent of its batch.
        device: Device to which batches are moved, with the teacher already on it; if omitted, the teacher is moved to
            the device of the batch.

    Raises:
        InputError: An output is unknown, or the model's attention projections, which `relations` needs, aren't found.
    """

    reads_context = True  # of a batch of later tokens of texts

    def __init__(
        self,
        model: PreTrainedModel,
        outputs: Sequence[str] = ("logits",),
        *,
        new_tokens: int = 64,
        temperature: float = 0.0,
        seed: int = 0,
        device: torch.device | None = None,
    ):
        unknown = [name for name in outputs if name not in OUTPUTS]
        if unknown:
            raise InputError(f"teacher: expected outputs among {', '.join(OUTPUTS)}, found {', '.join(unknown)}")
        self.model, self.outputs = freeze(model), tuple(outputs)
        self.new_tokens, self.temperature, self.seed = new_tokens, temperature, seed
        if "relations" in outputs:
            find_attention_projections(model)  # raises if there are none
        self.device = device

    @torch.no_grad()
    def __call__(self, batch: Mapping[str, Tensor]) -> TeacherSignals:
        """Computes the requested outputs for a padded batch.

        Returns:
            logits [batch, classes] or [batch, length, classes], or [positions, vocabulary], sample by sample, if only
            some `positions` of a vocabulary are requested; hidden (layers + 1) x [batch, length, width]; relations
            layers x (query, key, value), each [batch, length, width]; embedding [batch, width], the output of a
            sentence encoder, or for any other model the mean of the last layer over the tokens; generated (ids,
            log-probabilities), each with a [tokens] tensor per sample.
        """
        device = self.device or batch["input_ids"].device
        context = {"context": batch["context"]} if "context" in batch else {}
        batch = {name: value.to(device) for name, value in batch.items() if isinstance(value, Tensor)} | context
        if self.device is None and self.model.device != device:
            self.model.to(device)  # type: ignore[arg-type]
        signals = TeacherSignals()
        if set(self.outputs) - {"generated"}:
            signals = self._forward(batch)
        if "generated" in self.outputs:
            signals["generated"] = self._generate(batch)
        return signals

    def _forward(self, batch: Mapping[str, Tensor]) -> TeacherSignals:
        needs_states = "hidden" in self.outputs or "embedding" in self.outputs
        capture: AbstractContextManager[list[AttentionVectors]] = (
            capture_attention_vectors(self.model) if "relations" in self.outputs else nullcontext([])
        )
        restriction = restrict_logits(self.model, batch) if "positions" in batch else nullcontext()
        with capture as vectors, restriction:
            inputs = build_inputs(self.model, batch) | forgo_cache(self.model, batch)
            output = self.model(**inputs, output_hidden_states=needs_states)
        logits = find_logits(output)
        signals = TeacherSignals() if logits is None else TeacherSignals(logits=logits)
        if "hidden" in self.outputs:
            signals["hidden"] = output.hidden_states
        if "embedding" in self.outputs:
            is_vector = isinstance(self.model, PooledModel | TokenVectorsSentenceModel)
            signals["embedding"] = (
                read_logits(output) if is_vector else _average_tokens(output.hidden_states[-1], batch)
            )
        if "relations" in self.outputs:
            signals["relations"] = vectors
        return signals

    def _generate(self, batch: Mapping[str, Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Continues each prompt up to and including the end token, or for `new_tokens`."""
        prompts = [ids[mask] for ids, mask in zip(batch["input_ids"], batch["attention_mask"].bool(), strict=True)]
        continuations = generate(
            self.model, prompts, new_tokens=self.new_tokens, temperature=self.temperature, seed=self.seed
        )
        return continuations.split_rows()


def _average_tokens(states: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    mask = batch["attention_mask"][..., None].to(states.dtype)
    return (states * mask).sum(1) / mask.sum(1)
