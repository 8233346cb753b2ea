"""Data sets of words with a tag each, from table columns or CoNLL files."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pyarrow as pa

from distill.data.config import DataConfig
from distill.data.sources.cells import hold_fractions, is_bracketed, parse_list
from distill.data.sources.columns import (
    check_distinct,
    check_readable,
    find_column,
    missing_column_error,
    require_column,
)
from distill.data.sources.tables import read_splits, read_table
from distill.data.sources.text_column import iterate_cells
from distill.data.splits.evaluated import find_label_column, read_evaluated
from distill.data.splits.examples import Examples, Splits
from distill.data.splits.findings import Findings
from distill.data.splits.holdout import hold_out_missing, split_at_random
from distill.data.splits.labels import check_missing, find_known_rows, missing_labels, report_spellings
from distill.data.splits.overlap import report_overlap
from distill.errors import InputError

WORDS = ("tokens", "words")
TAGS = ("ner_tags", "tags", "labels", "pos_tags")
OUTSIDE = "O"
NO_TAGS = ("-100", "-1")  # values that mark a word without a tag
TaggedRow = tuple[list[str], list[str]]  # words, tags


@dataclass(frozen=True)
class Tagged:
    """Sentences as lists of words, see `_add_blanks`, and the id of each word's tag; no tags for unlabelled text."""

    texts: list[list[str]]
    labels: list[list[int]] = field(default_factory=list)
    pairs: None = None

    def __len__(self) -> int:
        return len(self.texts)

    def table(self) -> pa.Table:
        """Returns the sentences as a table; the inverse of `from_table`."""
        columns = {"text": pa.array(self.texts, pa.list_(pa.string()))}
        return pa.table(columns | ({"label": pa.array(self.labels)} if self.labels else {}))

    @classmethod
    def from_table(cls, table: pa.Table) -> "Tagged":
        """Returns the sentences of a table that `table` returned."""
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
    tables = read_evaluated(config, findings, partial(_has_tags, config))
    rows = {name: _read_sentences(table, config, name, findings) for name, table in tables.items()}

    def cut(train: list[TaggedRow], fraction: float) -> tuple[list[TaggedRow], list[TaggedRow], str]:
        remaining, held_out = split_at_random(train, fraction, seed, "sentences")
        return remaining, held_out, f"{len(held_out)} rows held out of train, seed {seed}"

    hold_out_missing(rows, findings, config, cut)
    names = _find_tag_names(rows["train"], findings)
    for split in ("validation", "test"):
        known = find_known_rows(split, [tags for _, tags in rows[split]], names, config, findings, "tags", "words")
        rows[split] = [rows[split][i] for i in known]
    ids = {name: i for i, name in enumerate(names)}
    parts = {
        split: Tagged([words for words, _ in each], [[ids[tag] for tag in tags] for _, tags in each])
        for split, each in rows.items()
    }
    unlabelled = _load_unlabelled_words(config, findings)
    joined = {name: _join_words(part) for name, part in (parts | {"unlabelled": unlabelled}).items()}
    unlabelled = Tagged([unlabelled.texts[i] for i in report_overlap(joined, findings, "sentences")])
    return Splits(
        names, parts["train"], parts["validation"], parts["test"], unlabelled, findings.counts, findings.remarks
    )


def _has_tags(config: DataConfig, tables: dict[str, pa.Table], split: str) -> bool:
    """Returns whether a split has a tag other than the values that mark a word without a tag.

    True if neither it nor train has a column of tags.
    """
    column = find_label_column(tables[split], config, TAGS)
    if column is None:
        return find_label_column(tables["train"], config, TAGS) is None
    for cell in iterate_cells(tables[split][column]):
        tags = parse_list(cell)
        tags = str(cell or "").split() if tags is None else tags
        if any(tag is not None and str(tag) not in NO_TAGS for tag in tags):
            return True
    return False


def _read_sentences(table: pa.Table, config: DataConfig, split: str, findings: Findings) -> list[TaggedRow]:
    """Returns the words and tags of the non-empty rows of a split."""
    where = f"data {config.path!r}, {split}"
    text = require_column(table, config.text, "text", where) or find_column(table, WORDS)
    label = require_column(table, config.label, "label", where) or find_column(table, TAGS)
    if text is None:
        raise missing_column_error("text", WORDS, table, where)
    if label is None:
        raise missing_column_error("label", TAGS, table, where)
    check_distinct(where, text=text, label=label)
    words, tags = (_read_lists(table, column, where) for column in (text, label))
    all_tags = [tag for row in tags for tag in row]
    if hold_fractions(all_tags):
        raise InputError(
            f"{where}: expected the names of tags in column {label!r}, found numbers such as {all_tags[0]!r}: each "
            "would be a class of its own"
        )
    for row, (row_words, row_tags) in enumerate(zip(words, tags, strict=True), 1):
        _check_row(row_words, row_tags, f"{where}: row {row}")
    nonempty = [i for i, row in enumerate(words) if row]
    if not nonempty:
        raise InputError(f"{where}: column {text!r} contains no words in any of {len(words)} rows")
    missing = missing_labels(table, label)
    untagged = [i for i in nonempty if missing[i]]
    check_missing([i + 1 for i in untagged], where, label, [table[label][i].as_py() for i in untagged])
    findings.add_dropped_empty(split, len(words) - len(nonempty), len(words))
    return [(_add_blanks(words[i]), tags[i]) for i in nonempty]


def _check_row(words: Sequence[str], tags: Sequence[str], where: str) -> None:
    """Checks that every word of a row has a tag.

    Raises:
        InputError: The row has different numbers of words and tags, or a value that marks a word without a tag.
    """
    if len(words) != len(tags):
        raise InputError(
            f"{where}: expected one tag per word, found {len(words)} words and {len(tags)} tags: words would get the "
            "tags of others"
        )
    mark = next((each for each in NO_TAGS if each in tags), None)
    if mark is not None:
        raise InputError(
            f"{where}: expected one tag per word, found {mark} for {words[tags.index(mark)]!r}: it marks words without "
            "a tag, and would be learnt as a tag"
        )


def _read_lists(table: pa.Table, column: str, where: str) -> list[list[str]]:
    check_readable(table, column, where)
    cells = enumerate(iterate_cells(table[column]), 1)
    return [_parse_strings(cell, f"{where}: row {row}, column {column!r}") for row, cell in cells]


def _add_blanks(words: list[str]) -> list[str]:
    """Returns the words with a blank before each but the first.

    Byte-level tokenizers encode `a b` as `a`, `Ġb`; without the blank the second word would become a token other than
    the one that models see in running text. Other tokenizers strip the blank or add it themselves. Words that already
    start with a blank are unchanged, so that a run can read its own files like the original data.
    """
    return words[:1] + [word if not word.strip() or word[0].isspace() else f" {word}" for word in words[1:]]


def _parse_strings(cell: object, where: str) -> list[str]:
    """Parses a cell into strings: a list, JSON of one, or words separated by blanks.

    Raises:
        InputError: The cell looks like a list but can't be parsed, or an element is null or nested.
    """
    values = parse_list(cell)
    if values is None:
        if isinstance(cell, str) and is_bracketed(cell):
            raise InputError(
                f"{where}: expected a list in JSON or words between blanks, found {cell[:60]!r}: its brackets and "
                "commas would become parts of words"
            )
        return [] if cell is None else str(cell).split()
    if None in values:
        raise InputError(f"{where}: expected words or tags, found null at position {values.index(None) + 1}")
    nested = next((each for each in values if isinstance(each, (list, dict))), None)
    if nested is not None:
        raise InputError(
            f"{where}: expected a list of words or tags, found {str(nested)[:60]!r} in it: its written form would be "
            "taken for one"
        )
    return [str(each) for each in values]


def _find_tag_names(train: Sequence[TaggedRow], findings: Findings) -> tuple[str, ...]:
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


def _join_words(part: Tagged) -> Examples:
    return Examples(["".join(words) for words in part.texts], None)


def _load_unlabelled_words(config: DataConfig, findings: Findings) -> Tagged:
    if config.unlabelled is None:
        return Tagged([])
    table = read_table(Path(config.unlabelled).expanduser())
    sentences = _read_words(table, config, f"unlabelled text {config.unlabelled!r}")
    findings.add_dropped_empty("unlabelled", len(table) - len(sentences), len(table))
    return sentences


def load_all_words(config: DataConfig) -> Tagged:
    """Returns every training sentence, held out later or not, and the unlabelled ones; tags are not read."""
    table = read_splits(config.path, config.subset)["train"]
    train, more = _read_words(table, config, f"data {config.path!r}, train"), _load_unlabelled_words(config, Findings())
    return Tagged(train.texts + more.texts)


def _read_words(table: pa.Table, config: DataConfig, where: str) -> Tagged:
    """Returns the words of a table without tags and without empty rows."""
    column = require_column(table, config.text, "text", where)
    text = column or find_column(table, WORDS) or find_column(table, ("text",))
    if text is None:
        raise missing_column_error("text", WORDS, table, where)
    return Tagged([_add_blanks(row) for row in _read_lists(table, text, where) if row])
