"""A teacher in memory, asked batch by batch."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel

from distill.answers import logits_of
from distill.attention import Vectors, attention_maps, watching
from distill.errors import InputError
from distill.inputs import INPUTS, model_inputs
from distill.teacher.load import frozen

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
            logits [batch, classes] or [batch, length, vocabulary]; hidden (layers + 1) x [batch, length, width];
            relations layers x (query, key, value), each [batch, length, width]; embedding [batch, width], the mean of
            the last layer over the tokens; generated (ids, log-probabilities), a [tokens] tensor a sample each.
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
        with watched as caught:
            found = self.model(**model_inputs(self.model, batch), output_hidden_states=deep)
        said = logits_of(found)
        out: dict[str, Any] = {"logits": said} if said is not None else {}
        if "hidden" in self.answers:
            out["hidden"] = found.hidden_states
        if "embedding" in self.answers:
            mask = batch["attention_mask"][..., None].to(found.hidden_states[-1].dtype)
            out["embedding"] = (found.hidden_states[-1] * mask).sum(1) / mask.sum(1)
        if "relations" in self.answers:
            out["relations"] = [tuple(layer) for layer in caught]
        return out

    def generate(self, batch: Mapping[str, Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Goes on after each prompt until the end token, which is kept, or `new_tokens`.

        Prompts of one length are generated together, so that no padding stands inside a sequence.
        """
        tokens = batch["attention_mask"].bool()
        lengths = tokens.sum(1)
        ids: list[Tensor] = [torch.empty(0)] * len(lengths)
        log_probs = list(ids)
        for length in lengths.unique().tolist():
            rows = (lengths == length).nonzero()[:, 0]
            found = self.generate_equal(batch["input_ids"][rows][tokens[rows]].view(-1, length))
            for row, sequence, scores in zip(rows.tolist(), *found, strict=True):
                ids[row], log_probs[row] = sequence, scores
        return ids, log_probs

    def generate_equal(self, prompts: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        own = self.model.generation_config
        ends = own.eos_token_id
        # A checkpoint's habits (a penalty for repetitions, the likeliest ids only) are not the teacher's distribution.
        self.model.generation_config = GenerationConfig(eos_token_id=ends)
        try:
            out = self.model.generate(  # type: ignore[operator]
                prompts,
                attention_mask=torch.ones_like(prompts),
                max_new_tokens=self.new_tokens,
                do_sample=False,
                logits_processor=LogitsProcessorList([Streams(prompts, self.temperature, self.seed)]),
                output_logits=True,
                return_dict_in_generate=True,
                pad_token_id=self.model.config.pad_token_id or 0,
            )
        finally:
            self.model.generation_config = own
        new = out.sequences[:, prompts.shape[1] :]
        scores = torch.stack(out.logits, 1).float() / (self.temperature or 1)
        scores = scores.log_softmax(-1).gather(-1, new[..., None])[..., 0]
        stops = torch.isin(
            new, torch.tensor(ends if isinstance(ends, list) else [ends if ends is not None else -1]).to(new)
        )
        counts = torch.where(stops.any(1), stops.int().argmax(1) + 1, new.shape[1]).tolist()
        return [row[:n] for row, n in zip(new, counts, strict=True)], [
            s[:n] for s, n in zip(scores, counts, strict=True)
        ]


class Streams(LogitsProcessor):
    """Adds Gumbel noise, so that the likeliest token is a draw from the softmax; none at temperature 0.

    Drawing from a batch at once would give a prompt other tokens in another batch, and a rebuilt cache other signals.
    """

    def __init__(self, prompts: Tensor, temperature: float, seed: int):
        self.temperature = temperature
        names = [prompt.cpu().numpy().astype("<i8").tobytes() + b"%d" % seed for prompt in prompts]
        seeds = [int.from_bytes(blake2b(name, digest_size=8).digest(), "little") for name in names]
        self.generators = [torch.Generator().manual_seed(each) for each in seeds]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if not self.temperature:
            return scores
        waits = [torch.empty(scores.shape[1]).exponential_(generator=each) for each in self.generators]
        return scores.float() / self.temperature - torch.stack(waits).log().to(scores.device)
