"""What a cache was made from."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from distill.errors import InputError

FORMAT = 1


@dataclass(frozen=True)
class Identity:
    """Everything that decides the signals besides the samples.

    Args:
        teacher: Hash of the teacher's weights and label order.
        tokenizer: Hash of the tokenizer's rules.
        signal: Kind of signal, such as `logits`.
        width: Numbers a row, such as the number of classes.
        preprocessing: Anything else the teacher saw or was told.
    """

    teacher: str
    tokenizer: str
    signal: str
    width: int
    preprocessing: str = ""
    format: int = FORMAT


def check_identity(folder: Path, expected: Identity) -> None:
    """Raises InputError naming each field in which the cache differs from `expected`."""
    file = folder / "cache.json"
    try:
        index = json.loads(file.read_text())
        found, _ = index["identity"], index["shard_rows"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"cache {str(folder)!r}: cache.json is missing or damaged ({error}): not a cache") from error
    wanted = asdict(expected)
    differing = [f"{k}: expected {wanted[k]!r}, found {found.get(k)!r}" for k in wanted if found.get(k) != wanted[k]]
    if differing:
        raise InputError(
            f"cache {str(folder)!r}: made from something else: {'; '.join(differing)}: its signals would be wrong here"
        )
