"""Identity of a cache: everything besides the samples that determines its signals."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from distill.cache.signals import Signal
from distill.errors import InputError

_FORMAT = 2


@dataclass(frozen=True)
class Identity:
    """Everything besides the samples that determines the signals.

    Args:
        teacher: Hash of the teacher's weights and label order.
        tokenizer: Hash of the tokenizer's rules.
        signals: Signals that are stored.
        preprocessing: Any other settings that affect the teacher's inputs or outputs.
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
            raise InputError(f"keep.signals: expected at least one signal, each of another kind, found {names}")
        if self.compression not in ("none", "zstd"):
            raise InputError(f"keep.compression: expected none or zstd, found {self.compression!r}")

    def settings(self) -> dict[str, object]:
        """Returns the identity as stored in cache.json."""
        return {
            "format": _FORMAT,
            "teacher": self.teacher,
            "tokenizer": self.tokenizer,
            "preprocessing": self.preprocessing,
            "compression": self.compression,
            "signals": {signal.name: json.loads(json.dumps(signal.settings())) for signal in self.signals},
        }

    @cached_property
    def digest(self) -> bytes:
        """16 bytes that enter every record's checksum, so that a record of another cache is never accepted."""
        return hashlib.sha256(json.dumps(self.settings(), sort_keys=True).encode()).digest()[:16]


def list_differences(expected: Mapping[str, object], found: Mapping[str, object], prefix: str = "") -> list[str]:
    """Returns one line per differing field, such as `signals.sampled.draws: expected 16, found 24`."""
    lines = []
    for name in sorted(expected.keys() | found.keys()):
        one, other = expected.get(name), found.get(name)
        if isinstance(one, dict) and isinstance(other, dict):
            lines += list_differences(one, other, f"{prefix}{name}.")
        elif one != other:
            lines.append(f"{prefix}{name}: expected {one!r}, found {other!r}")
    return lines
