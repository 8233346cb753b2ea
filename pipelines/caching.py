"""The writing of a cache with a person looking on, and what its identity is made of."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import (
    AutoModelForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from distill.teacher.cache import Identity, Samples, write_cache
from distill.teacher.cache.plan import BATCH_TOKENS
from distill.teacher.cache.preflight import Forecast
from distill.teacher.cache.signals import Signal
from distill.teacher.cache.writer import Written
from distill.teacher.load import frozen, tokenizer_fingerprint, weights_fingerprint
from distill.teacher.online import OnlineTeacher
from pipelines.console import Console


def load_teacher(folder: Path) -> PreTrainedModel:
    return frozen(AutoModelForSequenceClassification.from_pretrained(folder, use_safetensors=True))


def identity_of(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    signals: tuple[Signal, ...],
    preprocessing: str = "",
    compression: str = "none",
) -> Identity:
    return Identity(
        weights_fingerprint(model),
        tokenizer_fingerprint(tokenizer),
        signals,
        preprocessing,
        compression,  # type: ignore[arg-type]
    )


def answers_of(signals: tuple[Signal, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for signal in signals for name in signal.needs))


def forecast_line(expected: Forecast) -> str:
    return (
        f"  cache: {expected.samples:,} samples, {expected.tokens:,} tokens to ask about: about "
        f"{expected.disk_bytes / 1e6:,.1f} MB on disk ({expected.free_bytes / 1e9:,.0f} GB free), "
        f"{expected.seconds:,.0f} s, {expected.memory_bytes / 1e6:,.0f} MB of memory beside the teacher"
    )


def write_with_progress(
    console: Console,
    folder: Path,
    identity: Identity,
    samples: Samples,
    teacher: OnlineTeacher,
    *,
    batch_tokens: int = BATCH_TOKENS,
    force: bool = False,
    made_from: Mapping[str, Any] | None = None,
    rank: int = 0,
    ranks: int = 1,
) -> Written:
    """`write_cache` with its forecast, a progress bar, and a line for each shard that had to be repaired."""
    with console.track("cache: asking the teacher", len(set(samples.keys))) as advance:
        written = write_cache(
            folder,
            identity,
            samples,
            teacher,
            rank=rank,
            ranks=ranks,
            batch_tokens=batch_tokens,
            force=force,
            made_from=made_from,
            on_forecast=lambda expected: console.say(forecast_line(expected)),
            on_progress=advance,
        )
    for damage in written.damaged:
        console.say(f"  cache: {damage}; computed again")
    return written
