"""Data sets of words with a tag each, from table columns or CoNLL files."""

import re
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from distill.data.batches.encode import IGNORED, TokenRows, padded
from distill.data.config import DataConfig
from distill.data.sources.cells import hold_fractions, is_bracketed, list_in
from distill.data.sources.columns import check_distinct, check_readable, first_of, missing, named
from distill.data.sources.tables import read_splits, read_table
from distill.data.sources.text_column import iterate_cells
from distill.data.splits.evaluated import label_column, read_evaluated
from distill.data.splits.findings import Findings
from distill.data.splits.holdout import hold_out_missing, parted
from distill.data.splits.labelled import Examples, Splits
from distill.data.splits.labels import check_missing, known_rows, missing_labels, report_spellings
from distill.data.splits.overlap import report_overlap
from distill.errors import InputError

WORDS = ("tokens", "words")
TAGS = ("ner_tags", "tags", "labels", "pos_tags")
OUTSIDE = "O"
BLANKS = ("Ġ", "▁", "▁▁")  # tokens that are only blanks, in byte-level and SentencePiece tokenizers
NO_TAGS = ("-100", "-1")  # values that mark a word without a tag
Row = tuple[list[str], list[str]]  # words, tags


@dataclass(frozen=True)
class Tagged:
    """Sentences as lists of words, see `spaced`, and the id of each word's tag; no tags for unlabelled text."""

    texts: list[list[str]]
    labels: list[list[int]] = field(default_factory=list)
    pairs: None = None

    def __len__(self) -> int:
        return len(self.texts)

    def table(self) -> pa.Table:
        """Returns the sentences as a table; the inverse of `from_table`."""
        columns: dict[str, Any] = {"text": pa.array(self.texts, pa.list_(pa.string()))}
        return pa.table(columns | ({"label": pa.array(self.labels)} if self.labels else {}))

    @classmethod
    def from_table(cls, table: pa.Table) -> "Tagged":
        columns = {name: table[name].to_pylist() for name in table.column_names}
        return cls(columns["text"], columns.get("label", []))


def load_tagged(config: DataConfig, seed: int = 0) -> Splits:
    """Reads, checks and splits a data set of tagged sentences, as `load_splits` does for classes.

    Columns contain lists (in a csv file: words separated by blanks, or JSON); `.conll` files have a word per line with
    its tag last, and an empty line between sentences.

    Raises:
        InputError: A column or file is missing; a sentence has different numbers of words and tags; validation or test
            has a tag that is not in train; there are too few sentences to hold some out.
    """
    findings = Findings()
    tables = read_evaluated(config, findings, partial(has_tags, config))
    rows = {name: sentences(table, config, name, findings) for name, table in tables.items()}

    def cut(train: list[Row], fraction: float) -> tuple[list[Row], list[Row], str]:
        kept, held = parted(train, fraction, seed, "sentences")
        return kept, held, f"{len(held)} rows held out of train, seed {seed}"

    hold_out_missing(rows, findings, config, cut)
    names = tag_names(rows["train"], findings)
    for split in ("validation", "test"):
        kept = known_rows(split, [tags for _, tags in rows[split]], names, config, findings, "tags", "words")
        rows[split] = [rows[split][i] for i in kept]
    number = {name: i for i, name in enumerate(names)}
    parts: dict[str, Any] = {
        split: Tagged([words for words, _ in each], [[number[tag] for tag in tags] for _, tags in each])
        for split, each in rows.items()
    }
    unlabelled = unlabelled_words(config, findings)
    joined = {name: joined_words(part) for name, part in (parts | {"unlabelled": unlabelled}).items()}
    unlabelled = Tagged([unlabelled.texts[i] for i in report_overlap(joined, findings, "sentences")])
    return Splits(
        names, parts["train"], parts["validation"], parts["test"], unlabelled, findings.counts, findings.remarks
    )


def has_tags(config: DataConfig, tables: dict[str, pa.Table], split: str) -> bool:
    """Returns whether a split has a tag other than the values that mark a word without a tag; true if neither it nor
    train has a column of tags.
    """
    column = label_column(tables[split], config, TAGS)
    if column is None:
        return label_column(tables["train"], config, TAGS) is None
    for cell in iterate_cells(tables[split][column]):
        tags = list_in(cell)
        tags = str(cell or "").split() if tags is None else tags
        if any(tag is not None and str(tag) not in NO_TAGS for tag in tags):
            return True
    return False


def sentences(table: pa.Table, config: DataConfig, split: str, findings: Findings) -> list[Row]:
    """Returns the words and tags of the non-empty rows of a split."""
    where = f"data {config.path!r}, {split}"
    text = named(table, config.text, "text", where) or first_of(table, WORDS)
    label = named(table, config.label, "label", where) or first_of(table, TAGS)
    if text is None:
        raise missing("text", WORDS, table, where)
    if label is None:
        raise missing("label", TAGS, table, where)
    check_distinct(where, text=text, label=label)
    words, tags = (lists_of(table, column, where) for column in (text, label))
    every = [tag for row in tags for tag in row]
    if hold_fractions(every):
        raise InputError(
            f"{where}: expected the names of tags in column {label!r}, found numbers such as {every[0]!r}: each would "
            "be a class of its own"
        )
    for row, (one, other) in enumerate(zip(words, tags, strict=True), 1):
        if len(one) != len(other):
            raise InputError(
                f"{where}: row {row}: expected a tag a word, found {len(one)} words and {len(other)} tags: words would "
                "get the tags of others"
            )
        mark = next((each for each in NO_TAGS if each in other), None)
        if mark is not None:
            raise InputError(
                f"{where}: row {row}: expected a tag a word, found {mark} for {one[other.index(mark)]!r}: it marks "
                "what has none, and would be a tag like the others"
            )
    kept = [i for i, row in enumerate(words) if row]
    if not kept:
        raise InputError(f"{where}: column {text!r} holds no words in any of {len(words)} rows")
    without = missing_labels(table, label)
    absent = [i for i in kept if without[i]]
    check_missing([i + 1 for i in absent], where, label, [table[label][i].as_py() for i in absent])
    findings.add_dropped_empty(split, len(words) - len(kept), len(words))
    return [(spaced(words[i]), tags[i]) for i in kept]


def lists_of(table: pa.Table, column: str, where: str) -> list[list[str]]:
    check_readable(table, column, where)
    cells = enumerate(iterate_cells(table[column]), 1)
    return [listed(cell, f"{where}: row {row}, column {column!r}") for row, cell in cells]


def spaced(words: list[str]) -> list[str]:
    """Returns the words with a blank before each but the first.

    Byte-level tokenizers encode `a b` as `a`, `Ġb`; without the blank the second word would become a token other than
    the one that models see in running text. Other tokenizers strip the blank or add it themselves. Words that already
    start with a blank are unchanged, so that a run can read its own files like the original data.
    """
    return words[:1] + [word if not word.strip() or word[0].isspace() else f" {word}" for word in words[1:]]


def listed(cell: object, where: str) -> list[str]:
    """Parses a cell into strings: a list, JSON of one, or words separated by blanks.

    Raises:
        InputError: The cell looks like a list but can't be parsed, or an element is null or nested.
    """
    found = list_in(cell)
    if found is None:
        if isinstance(cell, str) and is_bracketed(cell):
            raise InputError(
                f"{where}: expected a list in JSON or words between blanks, found {cell[:60]!r}: its brackets and "
                "commas would be parts of words"
            )
        return [] if cell is None else str(cell).split()
    if None in found:
        raise InputError(f"{where}: expected words or tags, found none at place {found.index(None) + 1}")
    nested = next((each for each in found if isinstance(each, (list, dict))), None)
    if nested is not None:
        raise InputError(
            f"{where}: expected a list of words or tags, found {str(nested)[:60]!r} in it: how it is written down "
            "would be one"
        )
    return [str(each) for each in found]


def tag_names(train: Sequence[Row], findings: Findings) -> tuple[str, ...]:
    """Returns train's tags in a fixed order: numerically if all are numbers, else `O` first and the others by name.

    Raises:
        InputError: Train has fewer than two tags.
    """
    seen = Counter(tag for _, tags in train for tag in tags)
    if len(seen) < 2:
        raise InputError(f"data: expected at least two tags in train, found {', '.join(sorted(seen))}")
    report_spellings(seen, findings, "tags")
    if all(re.fullmatch(r"\d+", tag) for tag in seen):
        return tuple(sorted(seen, key=int))
    return tuple(sorted(seen, key=lambda tag: (tag != OUTSIDE, tag)))


def joined_words(part: Tagged) -> Examples:
    return Examples(["".join(words) for words in part.texts], None)


def unlabelled_words(config: DataConfig, findings: Findings) -> Tagged:
    if config.unlabelled is None:
        return Tagged([])
    table = read_table(Path(config.unlabelled).expanduser())
    found = bare_words(table, config, f"unlabelled text {config.unlabelled!r}")
    findings.add_dropped_empty("unlabelled", len(table) - len(found), len(table))
    return found


def load_bare_words(config: DataConfig) -> Tagged:
    """Returns every training sentence, held out later or not, and the unlabelled ones; tags are not read."""
    table = read_splits(config.path, config.subset)["train"]
    train, more = bare_words(table, config, f"data {config.path!r}, train"), unlabelled_words(config, Findings())
    return Tagged(train.texts + more.texts)


def bare_words(table: pa.Table, config: DataConfig, where: str) -> Tagged:
    text = named(table, config.text, "text", where) or first_of(table, WORDS) or first_of(table, ("text",))
    if text is None:
        raise missing("text", WORDS, table, where)
    return Tagged([spaced(row) for row in lists_of(table, text, where) if row])


@dataclass(frozen=True)
class TaggedRows(TokenRows):
    """Unpadded token ids of tagged sentences.

    A word is represented by its first token: `firsts` [length] is true there, `labels` [length] holds the word's tag
    there and IGNORED elsewhere. `places` are the indices of the words that have a token, `tags` the tag ids of all
    words, including truncated ones.
    """

    input_ids: list[np.ndarray]
    token_type_ids: list[np.ndarray] | None
    firsts: list[np.ndarray]
    labels: list[np.ndarray]
    places: list[list[int]]
    tags: list[list[int]]
    truncated: int

    @property
    def positions(self) -> list[np.ndarray]:
        return self.firsts

    @property
    def notes(self) -> dict[str, int]:
        return {"cut": self.truncated} if self.truncated else {}

    def joined(self, other: "TaggedRows") -> "TaggedRows":
        """Returns the rows of both, in order; rows without tags still have `places`."""
        if not len(other):
            return self
        return TaggedRows(
            *self.tokens_joined(other),
            self.firsts + other.firsts,
            self.labels + other.labels,
            self.places + other.places,
            self.tags + other.tags,
            self.truncated + other.truncated,
        )

    def collate(self, rows: Sequence[int] | np.ndarray, pad_id: int, epoch: int = 0) -> dict[str, Tensor]:
        """Pads the rows to the longest one: int64 [batch, length] each, `positions` bool."""
        return self.tokens(rows, pad_id) | {"labels": padded([self.labels[i] for i in rows], IGNORED)}


def encode_tagged(tokenizer: PreTrainedTokenizerBase, part: Tagged, max_length: int) -> TaggedRows:
    """Tokenizes the words, truncated to the smaller of `max_length` and the tokenizer's own limit.

    A word without tokens (a blank, a control character) gets no position, like a word beyond the limit.

    Raises:
        InputError: The tokenizer does not provide the word of each token.
    """
    if not tokenizer.is_fast:
        raise InputError(
            f"tokenizer {type(tokenizer).__name__}: expected a fast one, which knows the word of each piece; tags "
            "couldn't be laid on them"
        )
    if not len(part):
        return TaggedRows([], None, [], [], [], [], 0)
    limit = min(max_length, tokenizer.model_max_length)
    bare = puts_blanks(tokenizer)
    texts = [[word.removeprefix(" ") or word for word in row] for row in part.texts] if bare else part.texts
    full = tokenizer(texts, is_split_into_words=True, truncation=True, max_length=limit)
    firsts, labels, places, truncated = [], [], [], 0
    known = tokenizer.get_vocab()
    # Encoders (tokenizers with a cls and a mask token) are trained with a word's tag on its very first token.
    both_ways = tokenizer.cls_token_id is not None and tokenizer.mask_token_id is not None
    blanks = set() if both_ways else {known[each] for each in BLANKS if each in known}
    for row, words in enumerate(part.texts):
        ids = pieces_of(full.word_ids(row), full["input_ids"][row], blanks)
        first = np.array([word is not None and word != before for word, before in zip(ids, [None, *ids], strict=False)])
        tags = part.labels[row] if part.labels else [IGNORED] * len(words)
        firsts.append(first)
        own = [word if begins else None for word, begins in zip(ids, first, strict=True)]
        labels.append(np.array([IGNORED if word is None else tags[word] for word in own]))
        places.append([word for word in own if word is not None])
        truncated += len(full["input_ids"][row]) == limit and places[-1][-1:] != [len(words) - 1]
    types = full.get("token_type_ids")
    return TaggedRows(
        [np.asarray(row, np.int64) for row in full["input_ids"]],
        [np.asarray(row, np.int64) for row in types] if types is not None else None,
        firsts,
        labels,
        places,
        part.labels,
        truncated,
    )


def puts_blanks(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Returns whether the tokenizer adds a blank even before a word that starts with one, as Llama 2's does."""
    one, two = (tokenizer.backend_tokenizer.encode([word], is_pretokenized=True, add_special_tokens=False).tokens
                for word in ("a", " a"))  # fmt: skip
    return len(two) > len(one) and one[0].startswith(BLANKS[1])


def pieces_of(words: list[int | None], ids: list[int], blanks: Collection[int]) -> list[int | None]:
    """Returns the word of each token, but None for a separate blank token at the start of a word: a decoder would tag
    the blank before it has seen the word, for example where Qwen's and Llama 3's tokenizers split ` 5`.
    """
    before = [None, *words]
    return [None if ids[i] in blanks and before[i] != word else word for i, word in enumerate(words)]
