"""One file of rows: written whole or not at all, read only when its checksum holds."""

import hashlib
import json
import os
from dataclasses import asdict
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from distill.teacher.cache.identity import Identity


class DamagedShardError(Exception):
    """A shard that is truncated, changed or not one of this cache."""


def shard_path(folder: Path, index: int) -> Path:
    return folder / f"shard-{index:05d}.safetensors"


def write_shard(path: Path, identity: Identity, keys: np.ndarray, logits: np.ndarray) -> None:
    """Writes keys uint8 [rows, 16] and logits float32 [rows, classes] beside `path` and renames."""
    data = save({"keys": keys, "logits": logits}, metadata={"sha256": checksum(path, identity, keys, logits)})
    partial = path.with_suffix(f".{os.getpid()}.partial")
    with partial.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def read_shard(path: Path, identity: Identity) -> tuple[np.ndarray, np.ndarray]:
    """Returns keys uint8 [rows, 16] and logits float32 [rows, classes].

    Raises:
        DamagedShardError: The file is missing, truncated, changed, of another cache or in another shard's place.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            keys, logits = file.get_tensor("keys"), file.get_tensor("logits")
            stated = (file.metadata() or {}).get("sha256")
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise DamagedShardError(f"{path.name}: missing or unreadable ({error})") from error
    if stated != checksum(path, identity, keys, logits):
        raise DamagedShardError(
            f"{path.name}: differs from its checksum: changed, or a shard of another place or teacher"
        )
    return keys, logits


def checksum(path: Path, identity: Identity, keys: np.ndarray, logits: np.ndarray) -> str:
    # The place and the teacher count too: a whole shard copied from another cache would pass for ours.
    total = hashlib.sha256(json.dumps([path.name, asdict(identity)], sort_keys=True).encode())
    for part in (keys, logits):
        total.update(f"{part.dtype}:{part.shape}".encode())
        total.update(np.ascontiguousarray(part).tobytes())
    return total.hexdigest()
