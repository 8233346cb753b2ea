"""What a cache was made from."""

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from distill.cache.signals import Signal
from distill.errors import InputError

FORMAT = 2


@dataclass(frozen=True)
class Identity:
    """Everything that decides the signals besides the samples.

    Args:
        teacher: Hash of the teacher's weights and label order.
        tokenizer: Hash of the tokenizer's rules.
        signals: What is kept of the teacher's answer.
        preprocessing: Anything else the teacher saw or was told.
        compression: `none` or `zstd`, of each record.
    """

    teacher: str
    tokenizer: str
    signals: tuple[Signal, ...]
    preprocessing: str = ""
    compression: Literal["none", "zstd"] = "none"

    def __post_init__(self) -> None:
        names = [signal.name for signal in self.signals]
        if not names or len(set(names)) < len(names):
            raise InputError(f"cache: expected signals of different kinds, at least one, found {names}")
        if self.compression not in ("none", "zstd"):
            raise InputError(f"cache.compression: expected none or zstd, found {self.compression!r}")

    def settings(self) -> dict[str, Any]:
        """As it stands in cache.json."""
        return {
            "format": FORMAT,
            "teacher": self.teacher,
            "tokenizer": self.tokenizer,
            "preprocessing": self.preprocessing,
            "compression": self.compression,
            "signals": {signal.name: json.loads(json.dumps(signal.settings())) for signal in self.signals},
        }

    @cached_property
    def digest(self) -> bytes:
        """16 bytes that every record's checksum begins with: a record of another cache never passes for ours."""
        return hashlib.sha256(json.dumps(self.settings(), sort_keys=True).encode()).digest()[:16]


def differences(expected: dict[str, Any], found: dict[str, Any], at: str = "") -> list[str]:
    """One line for each field that differs, such as `signals.sampled.draws: expected 16, found 24`."""
    lines = []
    for name in sorted(expected.keys() | found.keys()):
        ours, theirs = expected.get(name), found.get(name)
        if isinstance(ours, dict) and isinstance(theirs, dict):
            lines += differences(ours, theirs, f"{at}{name}.")
        elif ours != theirs:
            lines.append(f"{at}{name}: expected {ours!r}, found {theirs!r}")
    return lines
