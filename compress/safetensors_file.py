"""Reproducible safetensors files: the library writes the entries of a header's metadata in random order."""

import json
from pathlib import Path

LENGTH_BYTES = 8  # at the start of a file: length of the JSON header after it, little-endian


def sort_metadata(path: Path) -> None:
    """Rewrites the header of a safetensors file with its metadata sorted by name, in place.

    Files with equal content then have equal bytes.
    """
    with path.open("r+b") as file:
        length = int.from_bytes(file.read(LENGTH_BYTES), "little")
        header = json.loads(file.read(length))
        if "__metadata__" not in header:
            return
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode().ljust(length)
        if len(text) == length:  # else the tensors after the header would be overwritten
            file.seek(LENGTH_BYTES)
            file.write(text)
