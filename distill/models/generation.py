"""Batched text generation with causal language models, using a key-value cache."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b

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

from distill.data.batches.token_blocks import find_end_token
from distill.errors import InputError
from distill.eval_mode import eval_mode


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

    def split_rows(self) -> tuple[list[Tensor], list[Tensor]]:
        """Returns ids and log-probabilities without padding, each a list with one [tokens] tensor per prompt."""
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
    vocabulary_size: int | None = None,
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
        vocabulary_size: Ids from this one on are never generated, whatever their logits; None allows all ids.

    Raises:
        InputError: The model can't generate text.

    Source: of top-p, Holtzman et al. 2020 (arXiv 1904.09751), section 3.1.
    """
    check_causal_lm(model, "model")
    pad = model.config.pad_token_id or 0
    ids = pad_sequence(list(prompts), batch_first=True, padding_value=pad, padding_side="left")
    mask = pad_sequence([torch.ones_like(each) for each in prompts], batch_first=True, padding_side="left")
    sampler = TokenSampler(prompts, temperature, seed, top_p, vocabulary_size)
    with _sampling_mode(model) as end_tokens:
        sequences: Tensor = model.generate(  # type: ignore[operator]
            ids,
            attention_mask=mask,
            max_new_tokens=new_tokens,
            do_sample=False,
            use_cache=True,
            logits_processor=LogitsProcessorList([sampler]),
            pad_token_id=pad,
            synced_gpus=True if _is_sharded(model) else None,
        )
    new = sequences[:, ids.shape[1] :]
    is_end = torch.isin(new, torch.tensor(end_tokens, device=new.device, dtype=new.dtype))
    lengths = torch.where(is_end.any(1), is_end.int().argmax(1) + 1, new.shape[1])
    padding = torch.arange(new.shape[1], device=new.device) >= lengths[:, None]
    log_probs = torch.stack(sampler.log_probs[: new.shape[1]], 1)
    return Continuations(new.masked_fill(padding, pad), lengths, log_probs.masked_fill(padding, 0))


def find_end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Returns the ids of the tokens that end a text: the model's end tokens and the one that the datasets append."""
    ids = {*_list_end_tokens(model.generation_config), find_end_token(tokenizer)}
    return sorted(each for each in ids if each is not None)


def _list_end_tokens(config: GenerationConfig) -> list[int]:
    ids: list[int] | int | None = config.eos_token_id
    return ids if isinstance(ids, list) else [ids] if ids is not None else []


def check_causal_lm(model: PreTrainedModel, name: str) -> None:
    """Checks that the model is a causal language model; `name` is its name in the error.

    Raises:
        InputError: The model is an encoder, or has no language-modelling head.
    """
    config = model.config
    is_decoder = getattr(config, "is_decoder", True) and not getattr(config, "is_encoder_decoder", False)
    if not model.can_generate() or not is_decoder:
        raise InputError(
            f"{name}: expected a causal language model, found {type(model).__name__}: it can't continue a text, and "
            "there would be no sequences"
        )


def _is_sharded(model: PreTrainedModel) -> bool:
    """Returns whether the model is sharded across processes.

    All of them must then keep generating until every process's rows are finished.
    """
    # FSDP's weights may be unsharded between a forward pass and the next step.
    return any(isinstance(each, DTensor) for each in model.parameters()) or any(
        isinstance(each, FSDPModule) for each in model.modules()
    )


@contextmanager
def _sampling_mode(model: PreTrainedModel) -> Iterator[list[int]]:
    """Puts the model into eval mode without generation settings except the end tokens, which the context yields.

    Mode and settings are restored afterwards. A checkpoint's generation settings (repetition penalty, top-k) would
    change the model's distribution. Layers in training mode would apply dropout and, under gradient checkpointing,
    disable the cache.
    """
    config = model.generation_config
    model.generation_config = GenerationConfig(eos_token_id=config.eos_token_id)
    try:
        with eval_mode(model):
            yield _list_end_tokens(config)
    finally:
        model.generation_config = config


class TokenSampler(LogitsProcessor):
    """Logits processor that leaves one token possible: a sample from the softmax, or the argmax at temperature 0.

    Each row has its own random stream. With a single one for the batch, a prompt's continuation would depend on its
    batch, and a rebuilt cache would contain different signals.

    Args:
        prompts: Token ids [length] each, which determine the random streams together with `seed`.
        temperature, seed, top_p, vocabulary_size: As in `generate`.
    """

    def __init__(
        self,
        prompts: Sequence[Tensor] | Tensor,
        temperature: float,
        seed: int,
        top_p: float = 1.0,
        vocabulary_size: int | None = None,
    ):
        self.temperature, self.vocabulary_size = temperature, vocabulary_size
        self.top_p_filter = TopPLogitsWarper(top_p) if top_p < 1 else None
        sources = [prompt.cpu().numpy().astype("<i8").tobytes() + b"%d" % seed for prompt in prompts]
        seeds = [int.from_bytes(blake2b(source, digest_size=8).digest(), "little") for source in sources]
        self.generators = [torch.Generator().manual_seed(each) for each in seeds]
        self.log_probs: list[Tensor] = []  # of the tokens chosen so far, float32 [rows] each

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Returns logits of 0 for each row's next token and minus infinity for all others."""
        scaled = scores.float() / (self.temperature or 1)
        if self.vocabulary_size is not None:
            scaled[:, self.vocabulary_size :] = -torch.inf
        chosen = self._sample(input_ids, scaled) if self.temperature else scaled.argmax(-1, keepdim=True)
        self.log_probs.append(scaled.log_softmax(-1).gather(-1, chosen)[:, 0])
        return torch.full_like(scores, -torch.inf).scatter(-1, chosen, 0)

    def _sample(self, input_ids: Tensor, logits: Tensor) -> Tensor:
        """Returns tokens sampled by inverting the cumulative distribution with each row's stream, int64 [rows, 1]."""
        filtered = logits if self.top_p_filter is None else self.top_p_filter(input_ids, logits)
        # float32 would lose the tail of a large vocabulary.
        cumulative = filtered.softmax(-1).cumsum(-1, dtype=torch.float64)
        numbers = torch.stack([torch.rand(1, generator=each, dtype=torch.float64) for each in self.generators])
        points = numbers.to(cumulative.device) * cumulative[:, -1:]
        return torch.searchsorted(cumulative, points, right=True).clamp(max=cumulative.shape[-1] - 1)
