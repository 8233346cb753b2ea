"""Batched text generation with causal language models, using a key-value cache."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TopPLogitsWarper,
)

from distill.data.batches.token_blocks import end_token
from distill.errors import InputError


@dataclass(frozen=True)
class Continuations:
    """The generated continuation of each prompt.

    Args:
        ids: int64 [rows, longest], padded on the right.
        lengths: int64 [rows], including the end token.
        log_probs: float32 [rows, longest], in nats: log-probability of each token at the temperature (at 1 where that
            is 0), over the full vocabulary even with top-p; 0 in the padding.
    """

    ids: Tensor
    lengths: Tensor
    log_probs: Tensor

    def rows(self) -> tuple[list[Tensor], list[Tensor]]:
        """Returns ids and log-probabilities, each a list with one [tokens] tensor per prompt."""
        counts = self.lengths.tolist()
        ids, log_probs = (
            [row[:count] for row, count in zip(values, counts, strict=True)] for values in (self.ids, self.log_probs)
        )
        return ids, log_probs


@torch.no_grad()
def generate(
    model: PreTrainedModel,
    prompts: Sequence[Tensor],
    *,
    new_tokens: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
    seed: int = 0,
    words: int | None = None,
) -> Continuations:
    """Generates a continuation of each prompt up to an end token, which is included, or `new_tokens` tokens.

    A continuation is a function of the model, the settings and its own prompt: each prompt has its own random stream
    and is left-padded with positions of its own, so other rows of the batch change its logits by rounding only. The
    model is in eval mode during generation, and its mode is restored afterwards; torch's random state is unchanged.

    Args:
        model: A decoder with a language-modelling head, on the prompts' device.
        prompts: int64 [length] each, at least one token; lengths may differ.
        new_tokens: Maximum number of new tokens per prompt.
        temperature: Divides the logits; 0 is greedy decoding.
        top_p: Sampling is restricted to the smallest set of most probable tokens with this total probability; 1 samples
            from all tokens.
        seed: Seed of the random streams.
        words: Ids from this one on are never generated, whatever their logits; None allows all ids.

    Raises:
        InputError: The model can't generate text.

    Source: of top-p, Holtzman et al. 2020 (arXiv 1904.09751), section 3.1.
    """
    check_generates(model, "model")
    pad = model.config.pad_token_id or 0
    ids = pad_sequence(list(prompts), batch_first=True, padding_value=pad, padding_side="left")
    mask = pad_sequence([torch.ones_like(each) for each in prompts], batch_first=True, padding_side="left")
    streams = Streams(prompts, temperature, seed, top_p, words)
    with sampling_mode(model) as ends:
        written = model.generate(  # type: ignore[operator]
            ids,
            attention_mask=mask,
            max_new_tokens=new_tokens,
            do_sample=False,
            use_cache=True,
            logits_processor=LogitsProcessorList([streams]),
            pad_token_id=pad,
            synced_gpus=True if is_sharded(model) else None,
        )
    new = written[:, ids.shape[1] :]
    stops = torch.isin(new, torch.tensor(ends, device=new.device, dtype=new.dtype))
    lengths = torch.where(stops.any(1), stops.int().argmax(1) + 1, new.shape[1])
    after = torch.arange(new.shape[1], device=new.device) >= lengths[:, None]
    log_probs = torch.stack(streams.log_probs[: new.shape[1]], 1)
    return Continuations(new.masked_fill(after, pad), lengths, log_probs.masked_fill(after, 0))


def ends_of(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Returns the ids of the tokens that end a text: the model's end tokens and the one that the datasets append."""
    own: Any = model.generation_config.eos_token_id
    known = own if isinstance(own, list) else [own]
    return sorted({end for end in (*known, end_token(tokenizer)) if end is not None})


def check_generates(model: PreTrainedModel, what: str) -> None:
    """Checks that the model is a causal language model.

    Raises:
        InputError: The model is an encoder, or has no language-modelling head.
    """
    config = model.config
    one_way = getattr(config, "is_decoder", True) and not getattr(config, "is_encoder_decoder", False)
    if not model.can_generate() or not one_way:
        raise InputError(
            f"{what}: expected a causal language model, found {type(model).__name__}: it can't go on with a text, and "
            "there would be no sequences"
        )


def is_sharded(model: PreTrainedModel) -> bool:
    """Returns whether the model is sharded across processes, which must then all keep generating until every process's
    rows are finished.
    """
    # FSDP's weights may be unsharded between a forward pass and the next step.
    whole = not any(isinstance(each, DTensor) for each in model.parameters())
    return not whole or any(isinstance(each, FSDPModule) for each in model.modules())


@contextmanager
def sampling_mode(model: PreTrainedModel) -> Iterator[list[int]]:
    """Puts the model into eval mode without generation settings except the end tokens, which the context yields;
    restores both afterwards.

    A checkpoint's generation settings (repetition penalty, top-k) would change the model's distribution. Layers in
    training mode would apply dropout and, under gradient checkpointing, disable the cache.
    """
    own, training = model.generation_config, [module for module in model.modules() if module.training]
    ends = own.eos_token_id
    model.generation_config = GenerationConfig(eos_token_id=ends)
    model.eval()
    try:
        yield ends if isinstance(ends, list) else [ends] if ends is not None else []
    finally:
        model.generation_config = own
        for module in training:
            module.training = True


class Streams(LogitsProcessor):
    """Logits processor that leaves one token possible: a sample from the softmax, or the argmax at temperature 0.

    With a single random stream for the batch, a prompt's continuation would depend on its batch, and a rebuilt cache
    would contain different signals.

    Args:
        prompts: Token ids [length] each, which determine the streams together with `seed`.
        temperature, seed, top_p, words: As in `generate`.
    """

    def __init__(
        self,
        prompts: Sequence[Tensor] | Tensor,
        temperature: float,
        seed: int,
        top_p: float = 1.0,
        words: int | None = None,
    ):
        self.temperature, self.words = temperature, words
        self.likeliest = TopPLogitsWarper(top_p) if top_p < 1 else None
        names = [prompt.cpu().numpy().astype("<i8").tobytes() + b"%d" % seed for prompt in prompts]
        seeds = [int.from_bytes(blake2b(name, digest_size=8).digest(), "little") for name in names]
        self.generators = [torch.Generator().manual_seed(each) for each in seeds]
        self.log_probs: list[Tensor] = []  # of the tokens chosen so far, float32 [rows] each

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scaled = scores.float() / (self.temperature or 1)
        if self.words is not None:
            scaled[:, self.words :] = -torch.inf
        chosen = self.drawn(input_ids, scaled) if self.temperature else scaled.argmax(-1, keepdim=True)
        self.log_probs.append(scaled.log_softmax(-1).gather(-1, chosen)[:, 0])
        return torch.full_like(scores, -torch.inf).scatter(-1, chosen, 0)

    def drawn(self, input_ids: Tensor, scaled: Tensor) -> Tensor:
        """Returns tokens sampled by inverting the cumulative distribution with each row's stream, int64 [rows, 1]."""
        kept = scaled if self.likeliest is None else self.likeliest(input_ids, scaled)
        reached = kept.softmax(-1).cumsum(-1, dtype=torch.float64)  # float32 would lose the tail of a large vocabulary
        numbers = torch.stack([torch.rand(1, generator=each, dtype=torch.float64) for each in self.generators])
        points = numbers.to(reached.device) * reached[:, -1:]
        return torch.searchsorted(reached, points, right=True).clamp(max=reached.shape[-1] - 1)
