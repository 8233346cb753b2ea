"""On-policy distillation: the student writes, and the teacher judges every token that it wrote."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PretrainedConfig, PreTrainedModel

from distill.cache import CacheReader
from distill.data.batches.encode import IGNORED
from distill.data.batches.read_ahead import Waiting
from distill.data.batches.share import counts, spoken_of
from distill.errors import InputError
from distill.losses.config import LossConfig
from distill.models.generation import Continuations, check_generates, generate
from distill.train.steps.on_policy_config import OnPolicyConfig

Batch = dict[str, Tensor]
Mean = Callable[[Tensor], Tensor]  # over the processes


class OnPolicy:
    """Puts what the student writes in the place of a step's batch, in a share of the steps.

    Whether, and what it writes, is a function of the seed, the step, the prompts and the weights: a run that was killed
    goes on as if it had not been, and all processes write in the same steps, each after its own rows' prompts.

    Source: Agarwal et al. 2024, generalised knowledge distillation (arXiv 2306.13649), algorithm 1. No gradient goes
    through the writing, as there.

    Args:
        config: How much is written, and how.
        seed: Of what is written, and of the steps in which it is.
        teacher: Config of the model that judges: what it has no words or positions for isn't written. A module with an
            `OnlineTeacher` takes that one's where there is none.
    """

    def __init__(self, config: OnPolicyConfig, seed: int = 0, teacher: PretrainedConfig | None = None):
        self.config, self.seed, self.teacher, self.writing = config, seed, teacher, Waiting()

    def stream(self, step: int) -> int | None:
        """Seed of what the student writes in a step; None in a step on the data's own texts."""
        chance = np.random.default_rng([self.seed, step])
        return int(chance.integers(1 << 62)) if chance.random() < self.config.share else None

    def batch_for(self, student: PreTrainedModel, step: int, batch: Batch, mean: Mean = torch.clone) -> Batch:
        """The batch of a step: `batch` itself, or the student's continuations of its prompts.

        Args:
            student: Writes in eval mode, and is left as it was.
            step: Of the optimizer.
            batch: input_ids, attention_mask, labels [rows, length] and, where not all is asked for, `positions`.
            mean: Averages a tensor over the processes that share the batch out.

        Returns:
            input_ids and attention_mask, int64 [rows, length], the sequences padded on the right; `positions`, bool,
            where the next token is one that the student wrote, its end token the last; labels, all IGNORED.
        """
        stream = self.stream(step)
        if stream is None:
            return batch
        start = now(batch["input_ids"].device)
        made = self.written(student, batch, stream)
        if "shares" in batch:
            made["shares"] = shares_of(batch, made, mean)  # type: ignore[assignment]
        self.writing.add(now(batch["input_ids"].device) - start)
        return made

    def written(self, student: PreTrainedModel, batch: Batch, stream: int) -> Batch:
        config, room = self.config, self.room(student)
        longest = room - config.new_tokens if room is not None else None
        prompts = [
            ids[:count] if longest is None else ids[:count][-longest:]
            for ids, count in prompts_of(batch, config.prompt_tokens)
        ]
        words = self.teacher.get_text_config().vocab_size if self.teacher is not None else None
        settings = {"temperature": config.temperature, "top_p": config.top_p, "seed": stream, "words": words}
        new = generate(student, prompts, new_tokens=config.new_tokens, **settings)  # type: ignore[arg-type]
        return asked_of(prompts, new, student.config.pad_token_id or 0)

    def room(self, student: PreTrainedModel) -> int | None:
        """Most tokens that a sequence of both models can have; None where neither says."""
        known = [room_of(each) for each in (student.config, self.teacher) if each is not None]
        return min((each for each in known if each is not None), default=None)


def prompts_of(batch: Mapping[str, Tensor], prompt_tokens: int) -> list[tuple[Tensor, int]]:
    """Of each row the ids without padding, and how many of them are the prompt: those up to the first position that is
    asked for the token after it; where that is the row's first or none is, `prompt_tokens`, but never the row's last,
    after which there is nothing to say.
    """
    tokens = batch["attention_mask"].bool()
    asked = spoken_of(batch) if "positions" in batch else tokens & (batch["labels"] != IGNORED)
    rows = [(ids[mask], each[mask]) for ids, mask, each in zip(batch["input_ids"], tokens, asked, strict=True)]
    firsts = [int(each.int().argmax()) for _, each in rows]
    most = [max(1, min(prompt_tokens, len(ids) - 1)) for ids, _ in rows]
    return [(ids, first + 1 if first else last) for (ids, _), first, last in zip(rows, firsts, most, strict=True)]


def asked_of(prompts: list[Tensor], new: Continuations, pad_id: int) -> Batch:
    """Prompts with their continuations as a batch in which these are asked for; see `OnPolicy.batch_for`."""
    rows = [torch.cat([prompt, ids]) for prompt, ids in zip(prompts, new.rows()[0], strict=True)]
    ids = pad_sequence(rows, batch_first=True, padding_value=pad_id)
    place = torch.arange(ids.shape[1], device=ids.device)
    first = torch.tensor([len(prompt) for prompt in prompts], device=ids.device)[:, None]
    end = first + new.lengths[:, None]
    return {
        "input_ids": ids,
        "attention_mask": (place < end).long(),
        "positions": (place >= first - 1) & (place < end - 1),
        "labels": torch.full_like(ids, IGNORED),
    }


def shares_of(batch: Mapping[str, Any], made: Batch, mean: Mean) -> dict[str, float]:
    """The batch's `shares` (see `distill.data.batches.share.share_of`) anew, for the student wrote as much as it liked;
    those of a process that only keeps the others company stay 0.
    """
    own = {name: count if batch["shares"]["tokens"] else 0 for name, count in counts(made).items()}
    usual = mean(torch.tensor(list(own.values()), dtype=torch.float32, device=made["input_ids"].device)).tolist()
    return {name: count / each if each else 0.0 for (name, count), each in zip(own.items(), usual, strict=True)}


def room_of(config: PretrainedConfig) -> int | None:
    """Most tokens that a sequence of the model can have; None where it doesn't say."""
    return getattr(config.get_text_config(), "max_position_embeddings", None)


def now(device: torch.device) -> float:
    """Seconds, once the device has done what it was told."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def check_on_policy(
    policy: OnPolicy, student: PreTrainedModel, loss: LossConfig, signals: Any, *, staged: bool = False
) -> None:
    """
    Raises:
        InputError: A student that can't write, a loss that doesn't read the teacher's distribution, or a teacher that
            can't be asked about what is written in the step.
    """
    check_generates(student, "on_policy: student")
    room, longest = policy.room(student), policy.config.prompt_tokens + policy.config.new_tokens
    if room is not None and longest > room:
        raise InputError(
            f"on_policy: expected prompt_tokens and new_tokens of at most {room} together, the longest sequence of "
            f"student and teacher, found {longest}: there are no positions for the last of them"
        )
    if staged:
        raise InputError("on_policy: a student in pipeline stages has no process that can write; lay it out otherwise")
    if not loss.kl or loss.divergence == "decoupled_kl":
        found = "no kl" if not loss.kl else "decoupled_kl, which needs labels"
        raise InputError(
            f"on_policy: expected the term kl with a divergence between whole distributions, found {found}: what the "
            "student writes has no labels, and nothing would be learnt from it"
        )
    if signals is None or isinstance(signals, CacheReader):
        raise InputError(
            "on_policy: expected a teacher that is asked in the step (an OnlineTeacher as `signals`), found "
            f"{'none' if signals is None else 'a cache'}: no cache holds an answer about what the student has yet to "
            "write"
        )
