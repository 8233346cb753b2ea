"""A folder with the token ids of many texts, which are read through memory maps.

`ids.tokens` holds the ids of all texts, one after another; `ends.tokens` the number of ids up to the end of each text;
`tokens.json` the counts and the type of the ids. The header is written last: a folder without it is incomplete.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from distill.data.batches.packing import require_end_token
from distill.data.stored.encoding import encode_in_order
from distill.data.stored.worker import Encoding
from distill.errors import InputError

IDS, ENDS, HEADER = "ids.tokens", "ends.tokens", "tokens.json"
_FORMAT = 1
_ENDS_TYPE = np.dtype("<i8")


@dataclass(frozen=True)
class StoredTokens:
    """The token ids of texts in a folder; each text's last id is the end token.

    The files are mapped into memory: pages that are read count as resident while there is room for them, and the system
    drops them first.

    Args:
        ids: Ids of all texts, unsigned integers [tokens].
        ends: Number of ids up to and including those of each text, int64 [texts].
    """

    ids: np.ndarray
    ends: np.ndarray

    @classmethod
    def open(cls, folder: Path) -> "StoredTokens":
        """Opens a folder that `write_tokens` wrote.

        Raises:
            InputError: The folder is incomplete, of another format, or a file doesn't have the header's size.
        """
        try:
            header = json.loads((folder / HEADER).read_text())
        except (OSError, ValueError) as error:
            raise InputError(f"tokens {str(folder)!r}: expected a header {HEADER}, found none: {error}") from error
        if header.get("format") != _FORMAT:
            raise InputError(
                f"tokens {str(folder)!r}: expected format {_FORMAT}, found {header.get('format')}: the ids would be "
                "misread; remove the folder to tokenize again"
            )
        return cls(
            _map_file(folder / IDS, np.dtype(header["dtype"]), header["tokens"]),
            _map_file(folder / ENDS, _ENDS_TYPE, header["texts"]),
        )

    def __len__(self) -> int:
        return len(self.ends)

    def measure_lengths(self) -> np.ndarray:
        """Returns the number of each text's ids with the end token, int32 [texts]."""
        lengths = np.empty(len(self.ends), np.int32)
        if len(lengths):
            lengths[0] = self.ends[0]
            np.subtract(self.ends[1:], self.ends[:-1], out=lengths[1:], casting="same_kind")
        return lengths

    def read(self, start: int, stop: int) -> np.ndarray:
        """Returns the ids from `start` up to `stop`, counted over all texts, int64."""
        return np.asarray(self.ids[start:stop], np.int64)


@dataclass(frozen=True)
class TokenizedTexts:
    """A split whose texts are tokenized already; replaces `Examples` in the `encode` of the language tasks."""

    texts: StoredTokens

    def __len__(self) -> int:
        return len(self.texts)


def write_tokens(
    folder: Path,
    tokenizer: PreTrainedTokenizerBase,
    texts: Iterable[str],
    *,
    processes: int | None = None,
    on_texts: Callable[[int], None] = lambda count: None,
) -> dict[str, int | str]:
    """Tokenizes texts and writes their ids, each followed by the end token; the result is the header.

    Args:
        folder: Existing folder for the files.
        tokenizer: The tokenizer.
        texts: The texts, in batches of which few are in memory at a time.
        processes: As in `encode_in_order`.
        on_texts: Called with the number of texts of each chunk that was written.

    Raises:
        InputError: The tokenizer has no end token.
        RuntimeError: As in `encode_in_order`.
    """
    end = require_end_token(tokenizer)
    largest = max([end, *tokenizer.get_vocab().values()])
    dtype = np.dtype("<u2") if largest < 2**16 else np.dtype("<u4")
    tokens = count = 0
    with (folder / IDS).open("wb") as ids_file, (folder / ENDS).open("wb") as ends_file:
        for ids, lengths in encode_in_order(tokenizer, texts, processes=processes):
            joined, ends = append_ends((ids, lengths), end, dtype)
            ids_file.write(joined.tobytes())
            ends_file.write((ends + tokens).astype(_ENDS_TYPE).tobytes())
            tokens, count = tokens + len(joined), count + len(lengths)
            on_texts(len(lengths))
    header: dict[str, int | str] = {"format": _FORMAT, "dtype": dtype.str, "tokens": tokens, "texts": count}
    (folder / HEADER).write_text(json.dumps(header, indent=1))
    return header


def append_ends(encoding: Encoding, end: int, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Returns the ids with an end token after each text [tokens + texts], and the ends of the texts, int64 [texts]."""
    ids, lengths = encoding
    ends = np.cumsum(lengths, dtype=np.int64) + np.arange(1, len(lengths) + 1)
    joined = np.empty(len(ids) + len(lengths), dtype)
    is_end = np.zeros(len(joined), bool)
    is_end[ends - 1] = True
    joined[is_end], joined[~is_end] = end, ids
    return joined, ends


def _map_file(file: Path, dtype: np.dtype, count: int) -> np.ndarray:
    found = file.stat().st_size if file.is_file() else 0
    if found != count * dtype.itemsize:  # reading past the end of a mapped file would kill the process
        raise InputError(
            f"tokens {str(file)!r}: expected {count * dtype.itemsize:,} bytes, found {found:,}: ids are missing; "
            "remove the folder to tokenize again"
        )
    return np.memmap(file, dtype, "r", shape=(count,)) if count else np.zeros(0, dtype)
