"""Data sets for sentence embeddings: plain sentences to train on, and scored pairs for evaluation."""

from collections import Counter
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from functools import partial
from pathlib import Path

import pyarrow as pa
from transformers import PreTrainedTokenizerBase

from distill.data.batches.encode import Encoded, encode_samples
from distill.data.config import DataConfig
from distill.data.sources.cells import parse_number
from distill.data.sources.columns import LABEL, PAIR, SCORE, find_column, find_columns
from distill.data.sources.files import find_format, find_split_name, read_utf8
from distill.data.sources.tables import TABLE_READERS, check_single, read_splits, read_table
from distill.data.splits.evaluated import find_label_column, read_evaluated
from distill.data.splits.examples import Examples, Splits
from distill.data.splits.findings import Findings
from distill.data.splits.holdout import check_strata, hold_out_missing
from distill.data.splits.labelled import find_missing_splits, hold_out_by_stratum
from distill.data.splits.labels import has_labels
from distill.data.splits.overlap import report_overlap
from distill.data.splits.raw_rows import LabelledRows, read_raw_rows, read_strings
from distill.errors import InputError
from distill.losses.logits import IGNORED

NUMBER = (*SCORE, *LABEL)
LINES = "train.txt"


def load_sentences(config: DataConfig, seed: int = 0) -> Splits:
    """Reads every sentence of train, without labels, and the pairs of validation and test with their scores.

    In a table of pairs both texts are sentences; in a txt file (`train.txt` in a folder, or `config.unlabelled`) every
    line is a sentence. Repeated sentences are dropped and counted. For a missing validation or test split, pairs of
    train are held out, and their sentences are not trained on.

    Args:
        config: Which data to read; `label` is the column with the score.
        seed: Seed for drawing the held-out pairs.

    Raises:
        InputError: There are no scored pairs for evaluation, a score is not a number, or there is no text to train on.
    """
    findings = Findings()
    tables = read_evaluated(config, findings, partial(_has_numbers, config), read_parts)
    missing = find_missing_splits(tables)
    scored = {split: table for split, table in tables.items() if split != "train" or missing}
    pairs = {split: _read_pairs(table, config, split, missing, findings) for split, table in scored.items()}
    if missing:
        check_strata([""] * len(pairs["train"].texts), missing)
    hold_out_missing(pairs, findings, config, hold_out_by_stratum(seed, lambda part: [""] * len(part.texts)))
    validation, test = (_to_examples(pairs[split]) for split in ("validation", "test"))
    held_out = {text for split in missing for text in flatten_pairs(_to_examples(pairs[split]))}
    seen: set[str] = set()
    sentences = _read_sentences(tables["train"], config, f"data {config.path!r}, train")
    train = _drop_seen(sentences, held_out, seen, "train", findings)
    if not train:
        raise InputError(f"data {config.path!r}, train: expected sentences that aren't held out, found none")
    unlabelled = _drop_seen(_load_unlabelled_sentences(config), held_out, seen, "unlabelled", findings)
    texts = {
        "train": train,
        "validation": flatten_pairs(validation),
        "test": flatten_pairs(test),
        "unlabelled": unlabelled,
    }
    remaining = report_overlap({name: Examples(each, None) for name, each in texts.items()}, findings, "sentences")
    more = Examples([unlabelled[i] for i in remaining], None)
    return Splits((), Examples(train, None), validation, test, more, findings.counts, findings.remarks)


def _has_numbers(config: DataConfig, tables: dict[str, pa.Table], split: str) -> bool:
    """Returns whether a split has a score other than -1.

    True if neither it nor train has a score column, so that `_read_pairs` reports it.
    """
    column, train_column = (find_label_column(tables[each], config, NUMBER) for each in (split, "train"))
    return train_column is None if column is None else has_labels(tables[split], column)


def load_all_sentences(config: DataConfig) -> Examples:
    """Returns every training sentence, held out later or not, and the unlabelled ones, without duplicates."""
    texts = _read_sentences(read_parts(config)["train"], config, f"data {config.path!r}, train")
    return Examples(_drop_seen([*texts, *_load_unlabelled_sentences(config)], set(), set(), "train", Findings()), None)


def read_parts(config: DataConfig) -> dict[str, pa.Table]:
    """Reads one table per split, as `read_splits` does; a folder's train may be a txt file with a sentence per line."""
    folder = Path(config.path).expanduser()
    if not (folder / LINES).is_file():
        return read_splits(config.path, config.subset)
    files = find_part_files(folder)
    tables = {split: read_table(file) for split, file in files.items() if find_format(file) in TABLE_READERS}
    return {"train": pa.table({"text": _read_lines(files["train"])})} | tables


def find_part_files(folder: Path) -> dict[str, Path]:
    """Returns the file of each split in a folder with `train.txt`.

    Raises:
        InputError: A split has two files.
    """
    by_split: dict[str, list[Path]] = {"train": [folder / LINES]}
    for file in sorted(folder.iterdir()):
        split = find_split_name(file)
        if split and find_format(file) in TABLE_READERS:
            by_split.setdefault(split, []).append(file)
    for split, files in by_split.items():
        check_single(split, files)
    return {split: files[0] for split, files in by_split.items()}


def _read_lines(file: Path) -> list[str]:
    return read_utf8(file).split("\n")


def _read_pairs(
    table: pa.Table, config: DataConfig, split: str, missing: Sequence[str], findings: Findings
) -> LabelledRows:
    """Returns the rows of a split as scored pairs; `missing` are the splits to hold out of train, for the message."""
    where = f"data {config.path!r}, {split}"
    pair = config.text_pair or find_column(table, PAIR)
    number = config.label or find_column(table, NUMBER)
    if pair is None or number is None:
        what = f"no {' and no '.join(missing)} split, and none " if split == "train" else "none "
        raise InputError(
            f"{where}: expected pairs of texts with a number each, found {what}among the columns "
            f"{', '.join(table.column_names)}: no student could be evaluated; add them, or name the columns with "
            "--data.text_pair and --data.label"
        )
    # Train's empty texts are counted later, when its pairs are split into sentences.
    return read_raw_rows(
        table,
        replace(config, text_pair=pair, label=number),
        split,
        Findings() if split == "train" else findings,
        parse_number,
    )


def _to_examples(part: LabelledRows) -> Examples:
    return Examples(part.texts, part.pairs, [float(number) for number in part.labels])


def flatten_pairs(part: Examples) -> list[str]:
    """Returns the texts of all pairs, the two texts of a pair next to each other."""
    return [text for pair in zip(part.texts, part.pairs or [], strict=True) for text in pair]


def _read_sentences(table: pa.Table, config: DataConfig, where: str) -> list[str]:
    """Returns every text of a table, row by row, including empty ones."""
    pair = config.text_pair if config.text_pair in table.column_names else None
    columns = find_columns(table, replace(config, text_pair=pair), where, labelled=False)
    firsts = read_strings(table, columns.text)
    rows = zip(firsts, read_strings(table, columns.text_pair), strict=True) if columns.text_pair else zip(firsts)
    return [text for row in rows for text in row]


def _load_unlabelled_sentences(config: DataConfig) -> list[str]:
    if config.unlabelled is None:
        return []
    file = Path(config.unlabelled).expanduser()
    table = pa.table({"text": _read_lines(file)}) if find_format(file) == ".txt" else read_table(file)
    return _read_sentences(table, config, f"unlabelled text {config.unlabelled!r}")


def _drop_seen(
    texts: Sequence[str], held_out: AbstractSet[str], seen: set[str], split: str, findings: Findings
) -> list[str]:
    """Returns the texts that are neither held out nor in `seen`, adds them to `seen`, and counts the others."""
    remaining, dropped = [], Counter[str]()
    for text in texts:
        if not text:
            dropped["empty"] += 1
        elif text in held_out:
            dropped["held_out"] += 1
        elif text in seen:
            dropped["duplicates"] += 1
        else:
            remaining.append(text)
            seen.add(text)
    findings.add_dropped_empty(split, dropped["empty"], len(texts), "sentences")
    for name, reason in (("duplicates", "they are duplicates"), ("held_out", "they are held out for evaluation")):
        before, count = int(findings.counts.get(f"dropped_{name}", 0)), dropped[name]
        remark = f"{split}: {count:,} of {len(texts):,} sentences were left out, because {reason}"
        findings.add(f"dropped_{name}", count, remark)
        findings.counts[f"dropped_{name}"] = before + count
    return remaining


def encode_sentences(tokenizer: PreTrainedTokenizerBase, part: Examples, max_length: int) -> Encoded:
    """Encodes one row per text: two consecutive rows for a pair.

    Pairs are matched again by their labels alone, so the rows of a pair may be in any batch and on any process:
    `labels` [rows, 2] are the index of a row's pair and the pair's score, both IGNORED for a text without a pair.
    """
    if part.pairs is None:
        return encode_samples(tokenizer, Examples(part.texts, None, [[IGNORED, IGNORED]] * len(part)), max_length)
    labels = [[i, number] for i, number in enumerate(part.labels) for _ in range(2)]
    return encode_samples(tokenizer, Examples(flatten_pairs(part), None, labels), max_length)
