"""Plain text for language models: documents in, blocks of token ids out."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from distill.data.columns import find_columns, first_of, missing
from distill.data.config import DataConfig
from distill.data.encode import IGNORED, Batch, TokenRows, padded
from distill.data.files import COMPRESSED, format_of, read_utf8, split_of
from distill.data.source import READERS, check_single, endings, read_splits
from distill.errors import InputError

TEXT = ".txt"
TEXTS_AT_ONCE = 256  # tokenized together: a whole corpus as Python lists takes ten times the memory of its ids


def read_texts(path: str, column: str | None = None, *, split: str = "train", subset: str | None = None) -> list[str]:
    """Reads the documents of one split, in the order of the source; documents without text are left out.

    Args:
        path: A txt file (one document, train), a folder of txt files and no table (one document each, sorted, with
            those of its subfolders), or what `read_splits` reads: a table file, a folder with a train table, a hub data
            set. A folder of txt files and subfolders that are all named like splits is read split by split; any other
            is all train.
        column: Column of a table that holds the text; `text` when left out.
        split: train, validation or test.
        subset: Name of the hub data set's configuration.

    Raises:
        InputError: Nothing at `path`, a broken or empty file (named), no such split or column, a column that holds no
            text, a column asked of txt files, or a folder where it can't be told what is train.
    """
    if not path:
        raise InputError("data: no path given: there would be nothing to read; name a file, a folder or a hub data set")
    files = text_files(path)
    found = files or read_splits(path, subset)
    if split not in found:
        raise InputError(f"data {path!r}: expected a split {split!r}, found {', '.join(found)}: nothing would be read")
    where = f"data {path!r}, {split}"
    if not files:
        texts = column_texts(found[split], column, where)
    elif column is None:
        texts = [read_utf8(file) for file in files[split]]
    else:
        raise InputError(f"{where}: expected a table with a column {column!r}, found txt files, which have no columns")
    kept = [text for text in texts if text.strip()]
    if not kept:
        raise InputError(f"{where}: expected text, found none in {len(texts)} documents: no token would be left")
    return kept


def split_names(path: str, subset: str | None = None) -> tuple[str, ...]:
    """The splits that `read_texts` finds at `path`, which may be none of them."""
    return tuple(text_files(path) or read_splits(path, subset))


def text_files(path: str) -> dict[str, list[Path]]:
    """The txt files of each split; empty where `path` is to be read as a table or from the hub."""
    place = Path(path).expanduser()
    if place.is_dir():
        return folder_files(place)
    if format_of(place) == TEXT:
        if not place.is_file():
            raise InputError(f"data {path!r}: expected a txt file, found no such file: nothing would be read")
        return {"train": [place]}
    if place.is_file() and format_of(place) not in READERS:
        raise InputError(
            f"data {path!r}: expected an ending among {endings(TEXT)}, found {place.suffix!r}: "
            "it can't be told how to read the file"
        )
    return {}


def folder_files(folder: Path) -> dict[str, list[Path]]:
    """Groups a folder's txt files by split, from the name of the file or subfolder that stands in the folder itself."""
    if any(is_table(file) for file in folder.iterdir()):
        return {}  # beside a table a txt file is more likely its readme than the text
    files = [file for file in folder.rglob("*") if format_of(file) == TEXT and file.is_file()]
    files.sort(key=lambda file: file.relative_to(folder).as_posix())
    if not files:
        names = ", ".join(sorted(p.name for p in folder.iterdir())[:12]) or "nothing"
        raise InputError(
            f"data {str(folder)!r}: expected txt files or a train file ({', '.join('train' + s for s in READERS)}, "
            f"each also with {COMPRESSED}), found {names}: there would be nothing to train on"
        )
    splits: dict[str, list[Path]] = {}
    others: list[Path] = []
    for file in files:
        split = split_of(Path(file.relative_to(folder).parts[0]))
        (splits.setdefault(split, []) if split else others).append(file)
    if not others:
        for split, found in splits.items():
            check_single(split, [file for file in found if file.parent == folder])
        return splits
    if "train" in splits:
        raise InputError(
            f"data {str(folder)!r}: expected names of splits only, or none, found {str(splits['train'][0])!r} beside "
            f"{str(others[0])!r}: text held out for the test would be trained on, or text for training left out"
        )
    return {"train": files}


def is_table(file: Path) -> bool:
    """Whether the ending is a table's; of json, which settings stand in as well, only what is named like a split."""
    return format_of(file) in READERS and (format_of(file) != ".json" or split_of(file) is not None)


def column_texts(table: pa.Table, column: str | None, where: str) -> list[str]:
    # `text` and no other name: of a table of questions and answers, half would be left out unseen.
    name = column or first_of(table, ("text",))
    if name is None:
        raise missing("text", ("text",), table, where)
    values = table[find_columns(table, DataConfig(text=name), where, labelled=False).text]
    return [value or "" for value in values.to_pylist()]


def token_blocks(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], length: int, *, limit: int = 0
) -> list[np.ndarray]:
    """Joins all texts to one stream of tokens and cuts it into blocks of `length`, int64 [length] each.

    With a `limit` there are at most so many blocks, and texts after them are not looked at.

    An end token (eos, or sep where there is none) follows every text. For a tokenizer with cls and sep each block is
    cls + `length` - 2 tokens of the stream + sep. The last block may be shorter; a single left-over token is dropped.

    Raises:
        InputError: `length` leaves less than two tokens of text a block, or the tokenizer has no end token.
    """
    end = end_token(tokenizer)
    if end is None:
        raise InputError(
            "tokenizer: expected an eos or a sep token, found neither: the end of one text and the start of the next "
            "would be learned as one sentence"
        )
    framed = tokenizer.cls_token_id is not None and tokenizer.sep_token_id is not None
    frame = 2 if framed else 0
    if length < frame + 2:
        raise InputError(
            f"length: expected at least {frame + 2} tokens a block, found {length}: "
            "a block would hold no token with another beside it"
        )
    step = length - frame
    stream = token_stream(tokenizer, texts, end, limit * step)
    blocks = [stream[start : start + step] for start in range(0, max(len(stream) - 1, 0), step)]
    blocks = blocks[:limit] if limit else blocks
    if not framed:
        return blocks
    first, last = np.array([tokenizer.cls_token_id], np.int64), np.array([tokenizer.sep_token_id], np.int64)
    return [np.concatenate([first, block, last]) for block in blocks]


def end_token(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The token that ends a text: eos, or sep where there is none; None where there is neither."""
    end = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.sep_token_id
    return None if end is None else int(end)


def token_stream(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], end: int, least: int = 0) -> np.ndarray:
    """The ids of all texts, each followed by `end`: int64 [tokens]; with `least` of so many that they are that long."""
    parts, count = [np.zeros(0, np.int64)], 0
    for start in range(0, len(texts), TEXTS_AT_ONCE):
        chunk = list(texts[start : start + TEXTS_AT_ONCE])
        rows = tokenizer(chunk, add_special_tokens=False, verbose=False)["input_ids"]  # quiet: long texts are meant
        parts += [np.array([*row, end], np.int64) for row in rows]
        count += sum(len(row) + 1 for row in rows)
        if least and count > least:
            break
    return np.concatenate(parts)


@dataclass(frozen=True)
class LanguageBlocks(TokenRows):
    """Blocks of token ids, int64 [length] each; `counted` is what was cut or left out of the text they are of."""

    input_ids: list[np.ndarray]
    token_type_ids: None = None
    counted: dict[str, int] = field(default_factory=dict)

    @property
    def notes(self) -> dict[str, int]:
        return {name: count for name, count in self.counted.items() if count}

    def collate(self, rows: Sequence[int] | np.ndarray, pad_id: int, epoch: int = 0) -> Batch:
        """Pads the rows to the longest of them: input_ids, attention_mask, labels, int64 [batch, length] each.

        The label of a position is the token after it, so logits and labels are compared without a shift; the last
        position of a row and the padding are IGNORED.
        """
        return self.tokens(rows, pad_id) | {"labels": next_tokens([self.input_ids[i] for i in rows])}


def next_tokens(rows: Sequence[np.ndarray]) -> Tensor:
    """The token after each, IGNORED after the last and on padding: int64 [rows, length]."""
    return padded([np.append(row[1:], IGNORED) for row in rows], IGNORED)
